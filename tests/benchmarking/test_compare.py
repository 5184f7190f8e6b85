"""Two result files side by side, through the command; no model is near."""

import copy
import json
import subprocess
import sys

import pytest

from marscli.benchmarking.results import Cell, Pass, Setting, table_rows
from marscli.cli.app import run
from marscli.output import write_json

META = {"model": "m", "device": "cpu", "options": {"limit": 8}, "versions": {"torch": "2.13.0"}, "interrupted": False}


def cell(method, seconds, batch_size=1, **setting):
    outputs = [[1, 2, 3, 4]]
    return Cell(Setting(method, **setting), batch_size, [Pass(outputs, [4], seconds, seconds / 4, 1)])


@pytest.fixture
def before(tmp_path):
    cells = [
        cell("hf", 4.0),
        cell("ar", 4.0),
        cell("threshold", 2.0, threshold=0.9),
        cell("verified", 1.0),
        cell("hf", 2.0, 4),
    ]
    path = tmp_path / "a" / "results.json"
    path.parent.mkdir()
    write_json(path, {"meta": META, "rows": table_rows(cells)})
    return path


def changed(before, change):
    document = json.loads(before.read_text())
    change(document)
    path = before.parent.parent / "b.json"
    write_json(path, document)
    return path


def compare(before, after, *more):
    return run(["bench", "--compare", str(before), str(after), *more])


def test_equal_runs_have_nothing_to_say(before, capsys):
    assert compare(before, before) == 0
    shown = capsys.readouterr()
    assert "| threshold τ=0.9" in shown.out
    assert "→" not in shown.out
    assert shown.err == ""
    assert compare(before.parent, before) == 0, "a folder stands for its results.json"


def test_a_ratio_that_fell_fails_and_is_named(before, capsys):
    after = changed(before, lambda document: document["rows"][2].update(speedup_vs_hf=1.75, tokens_per_forward=0.9))
    assert compare(before, after) == 1
    shown = capsys.readouterr()
    assert "2.00× → 1.75" in shown.out.replace("2.00 →", "2.00× →")
    assert "(-12%)" in shown.out
    assert shown.err.startswith("error: threshold τ=0.9, batch 1: speedup_vs_hf fell from 2.00 to 1.75 (-12%)")
    assert "hint: " in shown.err
    assert compare(before, after, "--tolerance", "0.13") == 0
    assert compare(after, before) == 0, "a ratio may rise"


def test_times_alone_do_not_matter(before):
    def slower(document):
        for row in document["rows"]:
            row["seconds"] *= 3
            row["tokens_per_second"] /= 3

    assert compare(before, changed(before, slower)) == 0


def test_a_row_that_no_longer_runs_fails_and_one_that_is_gone_is_told(before, capsys):
    def change(document):
        document["rows"][3].update(skipped="out of memory", speedup_vs_hf=None, speedup_vs_ar=None)
        del document["rows"][4]
        new = copy.deepcopy(document["rows"][1])
        document["rows"].append({**new, "batch_size": 8})
        document["meta"]["options"]["limit"] = 16
        document["meta"]["device"] = "cuda"

    assert compare(before, changed(before, change), "--json") == 1
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["regressions"] == ["verified exact, batch 1: ran before, now skipped: out of memory"]
    assert [row["batch_size"] for row in found["rows"]] == [1, 1, 1, 1, 8, 4]
    assert found["rows"][2]["speedup_vs_hf"] == {"before": 2.0, "after": 2.0}
    assert "limit: 8 → 16" in shown.err
    assert "device: cpu → cuda" in shown.err


def test_the_table_says_new_and_gone(before, capsys):
    assert compare(before, changed(before, lambda document: document["rows"][4].update(batch_size=8))) == 0
    out = capsys.readouterr().out
    assert [line.split("|")[-2].strip() for line in out.splitlines()[-2:]] == ["new", "gone"]


@pytest.mark.parametrize(
    ("text", "more", "names"),
    [
        (None, [], "cannot be read"),
        ("{", [], "not a result file"),
        ('{"rows": [{"a": 1}], "meta": {}}', [], "not a result file"),
        ('{"results": {}}', [], "not a result file"),
        ('{"rows": [], "meta": {}}', [], "no row of"),
        ('{"rows": [], "meta": {}}', ["--tolerance", "10"], "--tolerance: 10"),
    ],
)
def test_what_is_no_pair_of_results_is_refused(before, capsys, text, more, names):
    other = before.parent / "other.json"
    if text is not None:
        other.write_text(text)
    assert compare(before, other, *more) == 2
    assert names in capsys.readouterr().err


def test_no_torch_is_needed(before):
    code = (
        "import sys; from marscli.cli.app import run; "
        f"code = run(['bench', '--compare', {str(before)!r}, {str(before)!r}]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
