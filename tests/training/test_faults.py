"""What breaks a run from outside: kill −9 anywhere, a full disk. The last good checkpoint stays and is gone on from."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from tiny_runs import assert_same_run, train
from transformers import TrainerCallback

from marscli import checkpoint
from marscli.errors import InputError, MarsError
from marscli.training import callbacks
from marscli.training.callbacks import RUN_FILE
from marscli.training.trainer import MarsTrainer

OPTIONS = {"max_steps": 8, "save_steps": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, base, data):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(base, data, folder, **OPTIONS)
    return folder


def kill_self(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(monkeypatch, target, name, kill, base, data, folder):
    """Train in a process of its own which kills itself at a certain point."""
    with monkeypatch.context() as patch:
        patch.setattr(target, name, kill, raising=False)
        # A fork of this process needs no imports; spawned ones would take most of the test's time.
        child = multiprocessing.get_context("fork").Process(target=train, args=(base, data, folder), kwargs=OPTIONS)
        child.start()
        child.join(120)
    assert child.exitcode == -signal.SIGKILL


def test_kill_at_a_random_step(monkeypatch, whole, base, data, tmp_path):
    step = random.randrange(4, 8)

    def at_step(self, args, state, control, **kwargs):
        if state.global_step == step:
            kill_self()

    run_and_die(monkeypatch, callbacks.ProgressCallback, "on_step_begin", at_step, base, data, tmp_path)
    summary = train(base, data, tmp_path, **OPTIONS, resume=True)
    assert summary["resumed_from_step"] == 3 * (step // 3), step
    assert_same_run(whole, tmp_path)


def before_the_optimizer(self, output_dir):
    """The weights of checkpoint-6 are written, the optimizer is not."""
    if output_dir.endswith("checkpoint-6"):
        kill_self()
    WRITE_OPTIMIZER(self, output_dir)


def in_the_weights(self, output_dir=None, **kwargs):
    """A part of the weights of checkpoint-6 is written."""
    WRITE_MODEL(self, output_dir, **kwargs)
    if output_dir.endswith("checkpoint-6"):
        path = Path(output_dir) / "model.safetensors"
        os.truncate(path, path.stat().st_size // 2)
        kill_self()


WRITE_OPTIMIZER = MarsTrainer._save_optimizer_and_scheduler
WRITE_MODEL = MarsTrainer._save


@pytest.mark.parametrize(
    ("target", "name", "kill"),
    [
        (MarsTrainer, "_save", in_the_weights),
        (MarsTrainer, "_save_optimizer_and_scheduler", before_the_optimizer),
    ],
)
def test_kill_while_a_checkpoint_is_written(monkeypatch, whole, base, data, tmp_path, target, name, kill):
    run_and_die(monkeypatch, target, name, kill, base, data, tmp_path)
    assert (tmp_path / "checkpoint-6").is_dir()
    assert not (tmp_path / "checkpoint-6" / RUN_FILE).exists()
    assert train(base, data, tmp_path, **OPTIONS, resume=True)["resumed_from_step"] == 3
    assert_same_run(whole, tmp_path)


def test_kill_before_the_first_step_and_while_the_trained_model_is_moved_in(monkeypatch, whole, base, data, tmp_path):
    run_and_die(monkeypatch, os, "fsync", kill_self, base, data, tmp_path / "early")  # of the new log
    run_and_die(monkeypatch, checkpoint.shutil, "rmtree", kill_self, base, data, tmp_path / "late")
    for folder, resumed in ((tmp_path / "early", None), (tmp_path / "late", 6)):
        assert train(base, data, folder, **OPTIONS, resume=True)["resumed_from_step"] == resumed
        assert_same_run(whole, folder)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk(monkeypatch, whole, base, data, tmp_path):
    """A real error of a full disk, in the middle of a checkpoint."""

    def fill(self, args, state, control, **kwargs):
        if state.global_step == 5:
            (tmp_path / "checkpoint-6").mkdir()
            (tmp_path / "checkpoint-6" / "optimizer.pt").symlink_to("/dev/full")

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.ProgressCallback, "on_step_begin", fill, raising=False)
        with pytest.raises(MarsError) as caught:
            train(base, data, tmp_path, **OPTIONS)
    assert f"the disk of {tmp_path} is full" in caught.value.message
    assert "--resume" in caught.value.hint
    assert not (tmp_path / "checkpoint-6").exists(), "half-written"
    assert train(base, data, tmp_path, **OPTIONS, resume=True)["resumed_from_step"] == 3
    assert_same_run(whole, tmp_path)


def test_resuming_from_a_named_checkpoint(whole, base, data, tmp_path):
    shutil.copytree(whole, tmp_path / "first")
    summary = train(base, data, tmp_path / "second", **OPTIONS, resume_from=tmp_path / "first" / "checkpoint-3")
    assert summary["resumed_from_step"] == 3
    assert_same_run(whole, tmp_path / "second")
    (tmp_path / "first" / "checkpoint-6" / "optimizer.pt").unlink()
    with pytest.raises(InputError, match=r"no whole checkpoint \(optimizer.pt is missing\)") as caught:
        train(base, data, tmp_path / "third", **OPTIONS, resume_from=tmp_path / "first" / "checkpoint-6")
    assert "checkpoint-3" in caught.value.hint


def test_checkpoints_stay_only_where_they_were_asked_for(whole, base, data, tmp_path, monkeypatch):
    from marscli.training import arguments

    monkeypatch.setattr(arguments, "SAVE_STEPS", 2)
    seen = []

    class Look(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen.append(state.global_step)

    monkeypatch.setattr(callbacks.ProgressCallback, "on_save", Look.on_save)
    train(base, data, tmp_path, max_steps=5)
    assert seen == [2, 4]
    assert not list(tmp_path.glob("checkpoint-*"))
    assert sorted(path.name for path in whole.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
