"""A run that was killed goes on where it was, with the same settings only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from marscli.cli.app import run
from marscli.errors import InputError
from marscli.evaluation.config import EvalConfig
from marscli.evaluation.runner import run_eval


def document_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def without_times(document: dict) -> dict:
    """What must be the same in a resumed run and an unbroken one."""
    same = {key: document[key] for key in ("results", "configs", "versions", "n-shot", "n-samples")}
    runs = [
        {"results": entry["results"],
         "cost": {task: [cost["tokens"], cost["forwards"], cost["hit_limit"]] for task, cost in entry["tasks"].items()}}
        for entry in document["mars"]["runs"]
    ]  # fmt: skip
    return {**same, "runs": runs, "complete": document["mars"]["complete"]}


def test_a_killed_run_goes_on(model_dir, tasks, tmp_path, capsys):
    tasks.sums("first", max_gen_toks=4)
    tasks.colours("second")
    tasks.sums("third", max_gen_toks=80)
    options = ["eval", "-m", str(model_dir), "--include-path", str(tasks.folder), "--tasks", "first,second,third"]
    options += ["--threshold", "exact,0.5", "--log-samples", "-b", "1", "--no-verify"]
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    process = subprocess.Popen(
        [sys.executable, "-m", "marscli", *options, "-o", str(broken)], stderr=subprocess.DEVNULL, env=os.environ
    )
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if (broken / "results.json").exists() and "second" in document_of(broken)["mars"]["runs"][1]["tasks"]:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in broken.glob("samples_*")}
    assert "third" not in document_of(broken)["mars"]["runs"][1]["tasks"]

    assert run([*options, "-o", str(broken), "--resume"]) == 0
    said = capsys.readouterr().err
    assert "first: done already" in said
    assert "second: done already" in said
    assert "third: 6 problems" in said
    assert run([*options, "-o", str(whole)]) == 0
    assert without_times(document_of(broken)) == without_times(document_of(whole))
    names = sorted(path.name for path in whole.iterdir())
    assert sorted(path.name for path in broken.iterdir() if not path.name.startswith(".")) == names
    for name in names:
        if name.startswith("samples_"):
            assert (broken / name).read_text() == (whole / name).read_text()
    for name, changed in before.items():
        if "third" not in name:
            assert (broken / name).stat().st_mtime_ns == changed  # not written again


@pytest.fixture
def done(model_dir, tasks, tmp_path) -> dict:
    """Options of a run that is complete, as EvalConfig takes them."""
    options = {
        "model": str(model_dir), "tasks": [tasks.sums("first"), tasks.sums("second")], "max_new_tokens": 3,
        "include_path": tasks.folder, "output_dir": tmp_path / "out", "log_samples": True,
    }  # fmt: skip
    run_eval(EvalConfig(**options))
    return options


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_new_tokens": 4}, r"another --max-new-tokens: 3, now 4"),
        ({"tasks": ["first"]}, r"another --tasks: first,second, now first"),
        ({"threshold": ["exact", 0.5]}, r"another --threshold: exact, now exact,0.5"),
        ({"verify": False}, r"another --verify: True, now False"),
        ({"limit": 2}, r"another --limit: none, now 2"),
    ],
)
def test_other_settings_are_named(done, change, said):
    with pytest.raises(InputError, match=said):
        run_eval(EvalConfig(**{**done, **change, "resume": True}))


def test_another_model_in_the_same_folder_is_noticed(done):
    weights = Path(done["model"]) / "model.safetensors"
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    os.utime(weights)
    with pytest.raises(InputError, match="another model's files"):
        run_eval(EvalConfig(**done, resume=True))
    os.utime(weights, ns=times)
    run_eval(EvalConfig(**done, resume=True))


def test_what_is_missing_is_made_again_and_no_more(done, caplog):
    out = done["output_dir"]
    (out / "samples_second_exact.jsonl").unlink()
    kept = (out / "samples_first_exact.jsonl").stat().st_mtime_ns
    with caplog.at_level("INFO"):
        run_eval(EvalConfig(**done, resume=True))
    assert "first: done already" in caplog.text
    assert "second: 6 problems" in caplog.text
    assert (out / "samples_second_exact.jsonl").exists()
    assert (out / "samples_first_exact.jsonl").stat().st_mtime_ns == kept


def test_resume_begins_where_nothing_is_and_refuses_what_is_not_ours(done, tmp_path, capsys):
    fresh = run_eval(EvalConfig(**{**done, "output_dir": tmp_path / "new"}, resume=True))
    assert fresh["mars"]["complete"]
    (tmp_path / "new" / "results.json").write_text('{"results": {}}')
    command = ["eval", "-m", done["model"], "--include-path", str(done["include_path"]), "--tasks", "first,second"]
    assert run([*command, "-o", str(tmp_path / "new"), "--resume"]) == 2
    assert "not a result of mars eval" in capsys.readouterr().err
