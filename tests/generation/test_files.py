"""Files of prompts and results: rows in order, memory that stays flat, and runs that were broken off anywhere."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import count, islice

import pytest

import marscli
from marscli.cli.app import run
from marscli.generation import api
from marscli.generation.config import GenerateConfig
from marscli.generation.prompts import PromptRow

ROWS = [{"prompt": f"Question {i}", "id": i, "max_new_tokens": 3 + 7 * (i % 4)} for i in range(60)]
OPTIONS = ["-b", "4", "--no-verify", "--quiet"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture(scope="module")
def whole(mars_model, tmp_path_factory):
    """Results of a run that was not broken off."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    files = ["--input", str(folder / "prompts.jsonl"), "--output", str(folder / "out.jsonl")]
    assert run(["generate", "-m", str(mars_model), *files, *OPTIONS]) == 0
    return lines(folder / "out.jsonl")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(results):
    return [{k: v for k, v in result.items() if k not in ("seconds", "tokens_per_second")} for result in results]


def resume(model, prompts, target, *options):
    return run(
        ["generate", "-m", str(model), "--input", str(prompts), "--output", str(target), "--resume", *OPTIONS, *options]
    )


def test_a_killed_run_is_finished_without_losing_or_repeating_a_row(mars_model, prompts, whole, tmp_path):
    target = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "marscli", "generate", "-m", str(mars_model)]
    process = subprocess.Popen([*command, "--input", str(prompts), "--output", str(target), *OPTIONS])
    deadline = time.monotonic() + 60
    while not (target.exists() and target.read_bytes().count(b"\n") >= 5) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = target.read_bytes().count(b"\n")
    assert 5 <= before < len(ROWS)
    assert resume(mars_model, prompts, target) == 0
    assert untimed(lines(target)) == untimed(whole)


@pytest.mark.parametrize("kept", [0, 1, 7, 59])
@pytest.mark.parametrize("torn", [b"", b'{"index": ', b'{"index": 7, "text": "\xe6\x9d'])
def test_whatever_a_run_left_behind_is_gone_on_with(kept, torn, mars_model, prompts, whole, tmp_path):
    target = tmp_path / "out.jsonl"
    target.write_bytes(b"".join(json.dumps(result).encode() + b"\n" for result in whole[:kept]) + torn)
    assert resume(mars_model, prompts, target) == 0
    assert untimed(lines(target)) == untimed(whole)


def test_a_finished_run_has_nothing_to_do(mars_model, prompts, whole, tmp_path, monkeypatch, capsys):
    target = tmp_path / "out.jsonl"
    target.write_text("".join(json.dumps(result) + "\n" for result in whole))
    before = target.read_bytes()
    monkeypatch.setattr(api, "load", lambda *_, **__: pytest.fail("the model is not needed"))
    files = ["--input", str(prompts), "--output", str(target), "--resume"]
    assert run(["generate", "-m", str(mars_model), *files, "--no-verify"]) == 0
    assert target.read_bytes() == before
    assert "60 of 60 results were there already" in capsys.readouterr().err


def test_resume_without_results_is_an_ordinary_run(mars_model, prompts, whole, tmp_path):
    assert resume(mars_model, prompts, tmp_path / "new" / "out.jsonl") == 0
    assert untimed(lines(tmp_path / "new" / "out.jsonl")) == untimed(whole)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"prompt": "Question 9"}, [], "line 2 has prompt 'Question 9', where this run has 'Question 1'"),
        ({"index": 5}, [], "line 2 has index 5"),
        ({}, ["--threshold", "0.5"], "line 1 has threshold 1.0, where this run has 0.5"),
        ({}, ["--verify"], "line 1 has verified False"),
        ({}, ["-L", "2"], "more results than there are prompts"),
        (None, [], "line 2: no result of mars generate"),
    ],
)
def test_results_of_another_run_are_refused(change, options, message, mars_model, prompts, whole, tmp_path, capsys):
    target = tmp_path / "out.jsonl"
    second = {**whole[1], **change} if change is not None else ["text"]
    target.write_text("".join(json.dumps(result) + "\n" for result in (whole[0], second, whole[2])))
    before = target.read_bytes()
    assert resume(mars_model, prompts, target, *options) == 2
    assert message in capsys.readouterr().err
    assert target.read_bytes() == before


def test_rows_come_in_order_and_as_soon_as_they_can(mars_model):
    """The first row is the longest: the others wait for it, but not those behind the ones that are done."""
    checkpoint = marscli.load(str(mars_model), dtype="float32")
    cfg = GenerateConfig(batch_size=3, max_new_tokens=20)
    rows = [PromptRow("A", overrides={"max_new_tokens": 40}), *(PromptRow(f"B{i}") for i in range(12))]
    preparation = api.Preparation(checkpoint, cfg)
    ended = []
    found = api.iterate(
        checkpoint, map(preparation.job, rows), cfg, first_index=5, progress=lambda result: ended.append(result.index)
    )
    assert [result.index for result in found] == list(range(5, 18))
    assert sorted(ended) == list(range(5, 18))


def test_what_is_held_does_not_grow_with_the_number_of_rows(mars_model, monkeypatch):
    """An endless source of rows, one of them very long: rows are taken only as far ahead as is allowed."""
    monkeypatch.setattr(api, "MOST_UNORDERED", 30)
    checkpoint = marscli.load(str(mars_model), dtype="float32")
    cfg = GenerateConfig(batch_size=2, max_new_tokens=1)
    preparation = api.Preparation(checkpoint, cfg)
    taken = []

    def jobs():
        for index in count():
            taken.append(index)
            long = {"max_new_tokens": 50} if index == 100 else {}
            yield preparation.job(PromptRow("a", overrides=long))

    ahead = [taken[-1] - result.index for result in islice(api.iterate(checkpoint, jobs(), cfg), 300)]
    assert max(ahead) <= 33


def test_a_full_disk_is_a_failure_that_can_be_gone_on_with(mars_model, prompts, whole, tmp_path, capsys, monkeypatch):
    from marscli.generation.files import ResultFile

    target = tmp_path / "out.jsonl"
    write = ResultFile.write

    def full(self, result):
        if self.count == 3:
            self._handle.write(b'{"index": 3, "te')
            self._handle.flush()
            raise OSError(28, "No space left on device")
        write(self, result)

    with monkeypatch.context() as patched:
        patched.setattr(ResultFile, "write", full)
        files = ["--input", str(prompts), "--output", str(target)]
        assert run(["generate", "-m", str(mars_model), *files, "-b", "4", "--no-verify"]) == 1
    err = capsys.readouterr().err
    assert "3 of 60 results are in" in err
    assert "No space left" in err
    assert resume(mars_model, prompts, target) == 0
    assert untimed(lines(target)) == untimed(whole)


def test_a_pipe_is_read_once(mars_model, tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = '{"prompt": "a"}\n{"prompt": "b"}\n'
    writer = subprocess.Popen([sys.executable, "-c", f"open({str(pipe)!r}, 'w').write({text!r})"])
    assert run(["generate", "-m", str(mars_model), "--input", str(pipe), "-n", "2"]) == 0
    assert writer.wait() == 0
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["a", "b"]


def test_the_bar_shows_rows_and_rates(mars_model, prompts, tmp_path):
    import pty

    leader, follower = pty.openpty()
    files = ["--input", str(prompts), "--output", str(tmp_path / "out.jsonl")]
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "", "COLUMNS": "140"}
    process = subprocess.Popen(
        [sys.executable, "-m", "marscli", "generate", "-m", str(mars_model), *files, "-b", "4", "-L", "6"],
        stderr=follower,
        env=environment,
    )
    os.close(follower)
    text = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:
            break
        text += piece
    assert process.wait() == 0
    assert b"/6" in text
    assert b"tokens/forward" in text
