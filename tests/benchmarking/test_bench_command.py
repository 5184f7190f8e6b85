"""The command from its flags to its files, on a tiny random model."""

import csv
import json

import pytest

import marscli
from marscli.benchmarking import runner
from marscli.benchmarking.results import FIELDS
from marscli.cli.app import run
from tiny_chat import make_model, make_tokenizer, save_model, sums, write_rows

FILES = {"results.json", "results.csv", "report.md", "pareto.png", "speedup.png"}
QUICK = ["--limit", "2", "-n", "6", "--batch-sizes", "1,2", "--repeats", "2", "--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    model = make_model(max_position_embeddings=256)
    model.config.mask_token_id = model.config.pard_token = 3
    model.config.mars = {"version": 1, "block_size": 4, "ar_weight": 1.0, "base_model": "tiny"}
    return str(save_model(tmp_path_factory.mktemp("trained"), model, make_tokenizer(mask_token="<|mask|>")))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("untrained")))


def test_whole_run(trained, tmp_path, capsys):
    out = tmp_path / "new" / "bench"
    data = write_rows(tmp_path / "sums.jsonl", [{**row, "answer": "#### 8"} for row in sums(5)])
    thresholds = ["--thresholds", "exact", "--thresholds", "0.0001"]
    assert run(["bench", "-m", trained, "-d", str(data), "-o", str(out), *QUICK, *thresholds]) == 0
    shown = capsys.readouterr()
    assert {path.name for path in out.iterdir()} == FILES
    for text in ("hf", "ar", "threshold exact", "threshold τ=0.0001", "2 of 5 prompts", "transformers generate"):
        assert text in shown.out
    assert "answers were cut off at --max-new-tokens 6" in shown.err
    results = json.loads((out / "results.json").read_text())
    meta, rows = results["meta"], results["rows"]
    assert meta["options"]["batch_sizes"] == [1, 2]
    assert meta["prompts"] == {"used": 2, "available": 5, "partial": True}
    assert meta["interrupted"] is False
    assert meta["versions"]["torch"]
    assert [(row["batch_size"], row["method"]) for row in rows] == [
        (batch, method) for batch in (1, 2) for method in ("hf", "ar", "threshold", "threshold")
    ]
    for row in rows:
        assert tuple(row) == FIELDS
        assert row["skipped"] is None
        assert row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert row["prefill_seconds"] < row["seconds"]
        assert row["repeats"] == 2
        assert row["accuracy"] in (0, 0.5, 1)
        assert row["peak_memory_mb"] > 10
        if row["method"] != "threshold" or row["threshold"] == 1.0:
            assert row["tokens_per_forward"] == 1.0
            assert row["agrees_with_ar"] == 1.0
    wide = rows[3]
    assert (wide["block_size"], wide["draft_tokens"], wide["threshold"]) == (4, 3, 0.0001)
    assert wide["tokens_per_forward"] > 1.5
    assert rows[0]["speedup_vs_hf"] == rows[1]["speedup_vs_ar"] == 1.0
    with (out / "results.csv").open() as handle:
        read = list(csv.DictReader(handle))
    assert [float(row["tokens"]) for row in read] == [row["tokens"] for row in rows]
    report = (out / "report.md").read_text()
    for text in ("pareto.png", "speedup.png", "| threshold τ=0.0001", "mars ", meta["versions"]["torch"]):
        assert text in report
    for name in ("pareto.png", "speedup.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")

    assert run(["bench", "-m", trained, "-o", str(out), *QUICK]) == 2, "finished results are not replaced"
    assert "--force" in capsys.readouterr().err
    assert run(["bench", "-m", trained, "-o", str(out), *QUICK, "--methods", "ar", "--force", "--json", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert "results" not in shown.err
    assert [row["method"] for row in json.loads(shown.out)["rows"]] == ["ar", "ar"]
    assert not (out / "speedup.png").exists(), "an older run's picture does not stay beside new numbers"


def test_a_model_never_trained_with_masks(untrained, tmp_path, capsys):
    assert run(["bench", "-m", untrained, "-o", str(tmp_path), *QUICK, "--thresholds", "0.9", "--no-progress"]) == 0
    assert "skipped: the checkpoint was never MARS-trained" in capsys.readouterr().out
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["skipped"] is None for row in rows] == [True, True, False] * 2
    assert rows[2]["tokens_per_second"] is None
    alone = ["--methods", "threshold", "--thresholds", "0.9", "-o", str(tmp_path / "alone")]
    assert run(["bench", "-m", untrained, *QUICK, *alone]) == 1
    assert "no method could run" in capsys.readouterr().err
    assert not (tmp_path / "alone").exists()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--methods", "hf,verified"], "--methods: there is no method 'verified'"),
        (["--thresholds", "1.5"], "--thresholds: 1.5"),
        (["--block-size", "0"], "--block-size"),
        (["--batch-sizes", "1,4"], "--batch-sizes: 4 rows need as many prompts"),
        (["-d", "missing.jsonl"], "missing.jsonl"),
        (["--threshhold", "1"], "--threshhold"),
        (["-m", "no/such/folder/here"], "no/such/folder/here"),
        (["-o", "/proc/none"], "/proc/none"),
    ],
)
def test_wrong_usage_is_found_before_loading(trained, tmp_path, capsys, arguments, names, monkeypatch):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(runner.checkpoints, "load", load)
    out = tmp_path / "out"
    assert run(["bench", "-m", trained, "-o", str(out), "--limit", "2", "--batch-sizes", "1", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert names in shown.err.splitlines()[0]
    assert shown.err.splitlines()[-1].startswith("hint: ")
    assert not out.exists()


def test_prompts_that_leave_no_room_are_refused_before_loading(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.delattr(runner.checkpoints, "load")
    out = tmp_path / "out"
    assert run(["bench", "-m", trained, "-o", str(out), *QUICK, "-n", "250"]) == 2
    error = capsys.readouterr().err
    assert "--max-new-tokens: a prompt of" in error
    assert "context" in error
    assert not out.exists()


def test_ctrl_c_saves_what_is_measured(trained, tmp_path, capsys, monkeypatch):
    measured = []
    watched = runner._watched

    def interrupted(*arguments):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(1)
        return watched(*arguments)

    monkeypatch.setattr(runner, "_watched", interrupted)
    assert run(["bench", "-m", trained, "-o", str(tmp_path), *QUICK]) == 130
    shown = capsys.readouterr()
    assert "INTERRUPTED" in shown.out
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["meta"]["interrupted"] is True
    assert [row["repeats"] for row in results["rows"]] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert "before its turn" in results["rows"][3]["skipped"]


def test_python_function_has_the_same_defaults_and_needs_no_folder(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = marscli.bench(trained, methods=["hf", "ar"], batch_sizes=[1], limit=1, max_new_tokens=4, repeats=1)
    assert [row["method"] for row in result.rows] == ["hf", "ar"]
    assert result.meta["options"]["seed"] == 0
    assert list(tmp_path.iterdir()) == []
