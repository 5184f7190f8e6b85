"""The scripts in benchmarks/ run to their end on a tiny model and measure what they say."""

import json
import runpy
import sys
from pathlib import Path

import pytest

import marscli
from tiny_chat import save_model, sums, write_rows

SCRIPTS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A checkpoint after one MARS step, and its data."""
    folder = tmp_path_factory.mktemp("benchmarks")
    data = write_rows(folder / "rows.jsonl", sums(4))
    marscli.train(
        model=str(save_model(folder / "base")),
        dataset=str(data),
        output_dir=folder / "mars",
        max_steps=1,
        batch_size=4,
        device="cpu",
        dtype="float32",
    )
    return folder / "mars", data


def run(monkeypatch, tmp_path, script, *arguments):
    """Run a script as its command line does and return what it wrote to ``--json``."""
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments), "--json", str(out)])
    runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    return json.loads(out.read_text())


def test_decode_compares_every_method_with_generate(monkeypatch, tmp_path, capsys, tuned):
    names = "hf,ar,verified,verified m=2,threshold 0.8,block cache 0.95,jacobi"
    options = ("-d", tuned[1], "-n", 6, "--batch-sizes", "1,2", "--repeats", 1, "--dtype", "float32")
    rows = run(monkeypatch, tmp_path, "decode.py", "-m", tuned[0], *options, "--methods", names)
    assert [(row["batch_size"], row["method"]) for row in rows] == [(b, n) for b in (1, 2) for n in names.split(",")]
    exact = [row for row in rows if row["method"] in ("hf", "ar", "verified", "verified m=2", "jacobi")]
    assert all(row["same_as_ar"] == 1 for row in exact)
    assert all(row["tokens_per_forward"] == 1 for row in rows if row["method"] in ("hf", "ar"))
    assert len(capsys.readouterr().out.split("| --- |")[-1].splitlines()) == 1 + len(rows)


def test_decode_breaks_the_time_of_a_step_down(monkeypatch, capsys, tuned):
    options = ("-d", tuned[1], "-n", 6, "--batch-sizes", "1", "--dtype", "float32", "--breakdown")
    monkeypatch.setattr(sys, "argv", ["decode.py", "-m", *map(str, (tuned[0], *options))])
    runpy.run_path(str(SCRIPTS / "decode.py"), run_name="__main__")
    cells = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 1 |")]
    for _, _, step, *parts in cells:
        assert sum(map(float, parts)) == pytest.approx(float(step), abs=0.3)  # each is rounded to 0.1 ms
    assert [drafts for _, drafts, *_ in cells] == ["0", "1", "2"]


def test_train_cost_measures_the_four_steps(monkeypatch, tmp_path, tuned):
    found = run(
        monkeypatch, tmp_path, "train_cost.py", "-m", tuned[0], "-d", tuned[1], "-b", 2, "--batches", 1, "--repeats", 1
    )
    assert [row["step"] for row in found["rows"]] == ["ar", "transformers", "mars", "published"]
    assert all(row["seconds_per_example"] > 0 for row in found["rows"])


def test_train_quality_describes_plain_and_tuned_checkpoints(monkeypatch, tmp_path, tuned):
    plain = save_model(tmp_path / "plain")
    options = ("--held-out", 4, "--problems", 2, "--decoded", 2, "--thresholds", "0.9", "-n", 8)
    found = run(monkeypatch, tmp_path, "train_quality.py", plain, tuned[0], "-d", tuned[1], *options)["results"]
    assert [len(result["accuracy"]) for result in found] == [1, 5]
    assert "tokens_per_forward" not in found[0]
    assert set(found[1]["tokens_per_forward"]) == {"exact, verified", "τ 0.9", "τ 0.9, verified"}


def test_start_up_times_processes(monkeypatch, tmp_path):
    found = run(monkeypatch, tmp_path, "start_up.py", "--repeats", 1)
    assert "help" in json.dumps(found)
