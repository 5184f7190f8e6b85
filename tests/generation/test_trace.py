"""Traces: the text of each forward in the terminal and on a page, equal to the answer in sum."""

import html
import re

import pytest

import marscli
from marscli.cli.app import run
from marscli.core.decoding import StepRecord
from marscli.generation.api import GenerationResult
from marscli.generation.trace import spans, write_page

from .test_detokenize import BYTE_LEVEL


@pytest.fixture(scope="module")
def checkpoint(mars_model):
    return marscli.load(str(mars_model), device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "options", [{}, {"verify": False}, {"threshold": 1e-9}, {"threshold": 1e-9, "verify": False}, {"stop": "e"}]
)
def test_spans_joined_equal_the_answer(checkpoint, options):
    (result,) = marscli.generate(checkpoint, "Why?", max_new_tokens=30, **options)
    found = list(spans(result, checkpoint.tokenizer))
    assert "".join(span.text for span in found) == result.text
    assert len(found) == result.completion_tokens
    assert [span.forward for span in found] == sorted(span.forward for span in found)
    assert found[-1].forward == result.forwards
    for span in found:
        assert span.count == len(result.records[span.forward - 1].tokens)
        assert (span.kind == "next") == (span.offset == 0)


def made(records, text):
    tokens = [token for record in records for token in record.tokens]
    return GenerationResult(
        0, "<&@@ANSWER@@>", text, "stop", 3, len(tokens), len(records), 0.5, 1.0, True, tokens, records
    )


def record(tokens, offsets, reason=None):
    return StepRecord(0, tokens, [0.5] * len(tokens), offsets, reason, False, 0.1)


def test_what_drafts_were_and_what_was_kept_unverified():
    ids = BYTE_LEVEL("abcdefg").input_ids[:7]
    text = BYTE_LEVEL.decode(ids)
    eos = BYTE_LEVEL.eos_token_id
    records = [record(ids[:1], [0]), record(ids[1:6], [1, 2, 0, 1, 2]), record([*ids[6:], eos], [1, 2], "stop")]
    found = list(spans(made(records, text), BYTE_LEVEL))
    assert [span.kind for span in found[:6]] == ["next", "verified", "verified", "next", "unverified", "unverified"]
    assert {span.kind for span in found[6:]} == {"verified"}
    assert [span.special for span in found] == [False] * (len(found) - 1) + [True]


def test_the_page_holds_everything_and_needs_nothing(tmp_path):
    ids = BYTE_LEVEL("a <b> & c\nd").input_ids
    records = [record(ids[:2], [0, 1]), record([*ids[2:], BYTE_LEVEL.eos_token_id], [0] * (len(ids) - 1), "stop")]
    write_page(tmp_path / "page.html", made(records, "a <b> & c\nd"), BYTE_LEVEL, 'runs/"mars"')
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)
    assert "&lt;&amp;@@ANSWER@@&gt;" in page  # a prompt is text, whatever it looks like
    answer = page[page.index('id="answer">') : page.index("</pre>", page.index('id="answer">'))]
    shown = html.unescape(re.sub(r"<[^>]*>", "", answer.partition(">")[2]))
    assert shown == "a <b> & c\nd"
    assert 'class="t c2 next" data-f="1"' in answer
    assert "forward 1 · 2 tokens · kept from mask 1 · confidence 0.500" in answer
    assert "prefers-color-scheme: dark" in page


def test_trace_on_the_command_line(mars_model, tmp_path, capsys):
    options = ["-n", "12", "--threshold", "1e-9", "--no-verify"]
    text = marscli.generate(str(mars_model), "Why?", max_new_tokens=12, threshold=1e-9, verify=False)[0].text
    assert run(["generate", "-m", str(mars_model), "Why?", *options, "--trace"]) == 0
    out, err = capsys.readouterr()
    assert out.replace("|", "") == text + "\n"
    assert "|" in out
    assert "| stands between the forwards" in err
    page = tmp_path / "new" / "trace.html"
    assert run(["generate", "-m", str(mars_model), "Why?", *options, "--trace-html", str(page)]) == 0
    out, err = capsys.readouterr()
    assert out == text + "\n"
    assert str(page) in err
    assert page.read_text().startswith("<!doctype html>")
    assert run(["generate", "-m", str(mars_model), "Why?", *options, "--trace-html", str(page)]) == 2
    assert "the file exists already" in capsys.readouterr().err
    assert list(page.parent.iterdir()) == [page]
