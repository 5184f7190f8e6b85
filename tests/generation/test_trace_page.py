"""The trace page in a real headless Chromium: MARS_BROWSER=PROGRAM, or one on the PATH; skipped where there is none."""

import html
import os
import re
import shutil
import subprocess

import pytest

import marscli
from marscli.generation.trace import write_page

pytestmark = pytest.mark.browser

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
POINT_AT = """<script>
const target = tokens[{place}];
target.dispatchEvent(new PointerEvent("pointerover", {{bubbles: true}}));
target.dispatchEvent(new PointerEvent("pointermove", {{bubbles: true, clientX: 300, clientY: 200}}));
document.title = [tip.innerText, getComputedStyle(tip).display, document.querySelectorAll(".t.on").length,
  document.querySelectorAll(".t.first").length, document.querySelectorAll("[title]").length,
  getComputedStyle(document.body).backgroundColor, document.documentElement.scrollWidth <= innerWidth].join("|");
</script>"""


@pytest.fixture(scope="module")
def browser():
    program = os.environ.get("MARS_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium on the PATH; set MARS_BROWSER=PROGRAM")

    def show(page, *options):
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=800,900", *options]
        return subprocess.run(
            [*command, f"file://{page}"], capture_output=True, text=True, timeout=120, check=True
        ).stdout

    return show


@pytest.fixture(scope="module")
def traced(mars_model, tmp_path_factory):
    """A page, and the answer on it."""
    checkpoint = marscli.load(str(mars_model), dtype="float32")
    options = {"max_new_tokens": 40, "threshold": 0.1, "verify": False}
    (result,) = marscli.generate(checkpoint, "Why is <b>the sky</b> blue & 東京?", **options)
    page = tmp_path_factory.mktemp("page") / "trace.html"
    write_page(page, result, checkpoint.tokenizer, "a <model>")
    return page, result


@pytest.mark.parametrize(("scheme", "background"), [(1, "rgb(246, 247, 249)"), (0, "rgb(15, 19, 24)")])
def test_pointing_at_a_token_shows_its_forward(scheme, background, browser, traced, tmp_path):
    page, result = traced
    place = result.completion_tokens // 2
    forward = next(n for n in range(result.forwards) if sum(len(r.tokens) for r in result.records[: n + 1]) > place)
    count = len(result.records[forward].tokens)
    (tmp_path / "page.html").write_text(page.read_text() + POINT_AT.format(place=place))
    dom = browser(tmp_path / "page.html", f"--blink-settings=preferredColorScheme={scheme}", "--dump-dom")
    title = html.unescape(re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1])
    tip, display, outlined, firsts, titles, colour, fits = title.split("|")
    assert f"forward {forward + 1}" in tip
    assert "confidence 0." in tip or "confidence 1." in tip
    assert (display, int(outlined), int(firsts), int(titles)) == ("block", count, result.forwards, 0)
    assert (colour, fits) == (background, "true")
    assert "a &lt;model&gt;" in dom
    assert "Why is &lt;b&gt;the sky&lt;/b&gt; blue &amp; 東京?" in dom


def test_a_picture_of_the_page_shows_its_colours(browser, traced, tmp_path):
    import matplotlib.image

    page, result = traced
    browser(page, "--blink-settings=preferredColorScheme=1", f"--screenshot={tmp_path / 'page.png'}")
    picture = matplotlib.image.imread(tmp_path / "page.png")[..., :3]
    colours = {1: (236, 239, 242), 2: (191, 227, 251), 3: (181, 236, 196), 4: (251, 227, 160)}
    for count in {len(record.tokens) for record in result.records}:
        close = (abs(picture * 255 - colours[count]) < 2).all(-1)
        assert close.sum() > 100, count
