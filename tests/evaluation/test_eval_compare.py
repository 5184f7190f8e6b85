"""`mars eval --compare`: differences, their standard errors, and what makes two results incomparable."""

from __future__ import annotations

import json
import math
import statistics

import pytest

from marscli.cli.app import run
from marscli.evaluation.compare import compare
from marscli.evaluation.config import EvalConfig
from marscli.evaluation.runner import run_eval


@pytest.fixture
def two(model_dir, tasks, tmp_path):
    """Runs two evaluations with the options given for each; returns their folders."""

    def make(first: dict, second: dict):
        names = [tasks.sums(), tasks.colours()]
        for folder, options in (("a", first), ("b", second)):
            settings = {"model": str(model_dir), "tasks": names, "include_path": tasks.folder, "max_new_tokens": 12}
            run_eval(EvalConfig(**{**settings, "output_dir": tmp_path / folder, "verify": False, **options}))
        return tmp_path / "a", tmp_path / "b"

    return make


def test_differences_and_their_errors(two, capsys):
    a, b = two({"log_samples": True}, {"log_samples": True, "threshold": 0.1, "num_fewshot": 1})
    documents = [json.loads((folder / "results.json").read_text()) for folder in (a, b)]
    rows = {row["task"]: row for row in compare(a, b / "results.json")}
    for task, key in (("sums", "exact_match,number"), ("colours", "acc,none")):
        row = rows[task]
        values = [document["results"][task][key] for document in documents]
        assert (row["a"], row["b"], row["difference"]) == (*values, values[1] - values[0])
        assert (row["threshold_a"], row["threshold_b"], row["paired"]) == ("exact", "0.1", True)
    scores = []
    for folder, label in ((a, "exact"), (b, "0.1")):
        lines = (folder / f"samples_colours_{label}.jsonl").read_text().splitlines()
        scores.append([json.loads(line)["acc"] for line in lines])
    differences = [y - x for x, y in zip(*scores, strict=True)]
    expected = statistics.stdev(differences) / math.sqrt(len(differences))
    assert rows["colours"]["stderr"] == pytest.approx(expected)
    assert rows["sums"]["tokens_per_forward_a"] == 1.0 < rows["sums"]["tokens_per_forward_b"]

    (b / "samples_colours_0.1.jsonl").unlink()
    row = next(row for row in compare(a, b) if row["task"] == "colours")
    errors = [document["results"]["colours"]["acc_stderr,none"] for document in documents]
    assert (row["paired"], row["stderr"]) == (False, pytest.approx(math.hypot(*errors)))

    capsys.readouterr()
    assert run(["eval", "--compare", str(a), str(b)]) == 0
    shown = capsys.readouterr()
    assert "exact → 0.1" in shown.out
    assert "not the same measurement: --num-fewshot: A none, B 1" in shown.err
    assert run(["eval", "--compare", str(a), str(b), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_what_cannot_be_compared(two, tmp_path, capsys):
    a, b = two({"threshold": ["exact", 0.5]}, {"threshold": [0.3, 0.2]})
    for paths, said in (
        ((a, b), "no task at the same threshold"),
        ((a, tmp_path / "nowhere"), "cannot be read"),
        ((a, a / "pareto.png"), "not a result of mars eval"),
    ):
        assert run(["eval", "--compare", *map(str, paths)]) == 2
        assert said in capsys.readouterr().err
