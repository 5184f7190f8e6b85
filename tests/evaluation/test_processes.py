"""Several processes answer together: no question twice, none lost, in their order, and the same as one process."""

from __future__ import annotations

import json

import pytest

from marscli.cli.app import run
from marscli.errors import InputError, MarsError
from marscli.evaluation import processes
from marscli.evaluation.config import EvalConfig


def test_two_processes_on_five_questions(model_dir, tasks, tmp_path, capsys):
    drawn = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 6}
    names = [tasks.sums("sums", max_gen_toks=12), tasks.sums("drawn", **drawn), tasks.colours()]
    options = ["eval", "-m", str(model_dir), "--include-path", str(tasks.folder), "--tasks", ",".join(names)]
    options += ["--limit", "5", "--log-samples", "--threshold", "exact,0.3", "--no-verify"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert run([*options, "-o", str(one)]) == 0
    assert run([*options, "-o", str(two), "--num-processes", "2"]) == 0
    assert "8 rows together in each of 2 processes" in capsys.readouterr().err
    for path in sorted(one.glob("samples_*.jsonl")):
        rows = [json.loads(line) for line in (two / path.name).read_text().splitlines()]
        assert [row["doc_id"] for row in rows] == [0, 1, 2, 3, 4]
        alone = [json.loads(line) for line in path.read_text().splitlines()]
        if "colours" in path.name:
            for row, other in zip(rows, alone, strict=True):
                said, expected = ([float(choice[0][0]) for choice in r["resps"]] for r in (row, other))
                assert said == pytest.approx(expected, abs=1e-4)
        else:
            assert rows == alone
    document = [json.loads((folder / "results.json").read_text()) for folder in (one, two)]
    assert document[0]["results"] == document[1]["results"]
    assert document[1]["mars"]["num_processes"] == 2
    for ours, theirs in zip(document[1]["mars"]["runs"], document[0]["mars"]["runs"], strict=True):
        assert ours["tasks"]["sums"]["answers"] == 5
        for key in ("answers", "tokens", "forwards", "hit_limit"):
            assert ours["tasks"]["sums"][key] == theirs["tasks"]["sums"][key]


def test_a_process_that_does_not_start_is_reported(monkeypatch):
    monkeypatch.setattr(processes.sys, "executable", "/bin/false")
    with pytest.raises(MarsError, match="a process did not start: exit code 1"), processes.started(2):
        pass


def test_a_process_that_dies_ends_the_run_with_its_last_words(monkeypatch):
    children = []

    class Watched(processes._Children):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            children.append(self)

    monkeypatch.setattr(processes, "_Children", Watched)
    lm = type("Model", (), {"threshold": None, "answer": staticmethod(list)})()
    gone = r"one of 2 processes is gone: exit code -9"
    with pytest.raises(MarsError, match=gone) as caught, processes.started(2) as peers:  # noqa: PT012
        assert peers is not None
        children[0].processes[0].kill()
        children[0].processes[0].wait()
        peers.share(lm, "answer", ["a", "b"], ["a", "b"])
    assert "--resume" in caught.value.hint
    with processes.started(1) as alone:  # and the next run in this process is not one of several
        assert alone is None


def test_an_error_in_another_process_ends_the_run():
    class Failing:
        threshold = None

        def answer(self, questions):
            raise MarsError("too much", hint="take less")

    class Second(processes.Peers):
        def __init__(self):
            self.rank, self.number = 1, 2

    lm = Failing()
    lm.take_usage = lambda: type("Usage", (), {"cut_contexts": set()})()
    (part,) = Second().work(lm, processes.Job("answer", None, ["a", "b"], [0, 1]))
    assert (part.error, part.hint) == ("process 1: too much", "take less")


def test_numbers_that_cannot_run_are_refused(monkeypatch):
    config = EvalConfig(model="m", tasks="t", num_processes=2)
    with pytest.raises(InputError, match="mps"):
        processes.check(config, "mps")
    with pytest.raises(InputError, match="this machine has 0 CUDA devices"):
        processes.check(config, "cuda")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match="3 processes were launched"):
        processes.check(config, "cpu")
