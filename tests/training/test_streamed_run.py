"""Runs over streamed and packed data: the same rows, resumed bit for bit, errors with file and line."""

from __future__ import annotations

import shutil

import pytest
from tiny_runs import assert_same_run, log_figures, train

from marscli.data import prepare
from marscli.errors import MarsError
from tiny_chat import sums, write_rows


@pytest.mark.parametrize(
    "options",
    [
        {"streaming": True, "random_offset": True, "block_curriculum": True},
        {"packing": True, "random_offset": True, "max_length": 120},
        {"balance": True, "distill": True, "block_curriculum": True, "activation_checkpointing": True},
    ],
    ids=["stream", "packed", "balanced"],
)
def test_eight_steps_are_four_and_resumed_four(monkeypatch, base, data, tmp_path, options):
    monkeypatch.setattr(prepare, "SHUFFLE_BUFFER", 6)
    options = {**options, "max_steps": 8, "save_steps": 4}  # of a stream, more than one pass
    train(base, data, tmp_path / "whole", **options)
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "half" / "checkpoint-4")
    shutil.copy(tmp_path / "whole" / "train_log.jsonl", tmp_path / "half")
    assert train(base, data, tmp_path / "half", **options, resume=True)["resumed_from_step"] == 4
    assert_same_run(tmp_path / "whole", tmp_path / "half")


def test_a_stream_trains_on_every_row_once_a_pass(monkeypatch, base, data, tmp_path):
    """With rows of one step a pass the order does not matter, and both ways of reading train alike."""
    monkeypatch.setattr(prepare, "SHUFFLE_BUFFER", 6)
    for name, options in (("stream", {"streaming": True}), ("memory", {})):
        train(base, data, tmp_path / name, max_steps=3, batch_size=20, **options)
    for a, b in zip(log_figures(tmp_path / "stream"), log_figures(tmp_path / "memory"), strict=True):
        assert a[:4] == pytest.approx(b[:4], abs=1e-4)


def test_a_bad_row_that_is_met_on_the_way(monkeypatch, base, tmp_path):
    monkeypatch.setattr(prepare, "SHUFFLE_BUFFER", 4)
    data = write_rows(tmp_path / "a.jsonl", [*sums(110), {"text": "x"}, *sums(10)])
    with pytest.raises(MarsError) as caught:
        train(base, data, tmp_path / "x", max_steps=60, save_steps=10, streaming=True)
    assert caught.value.exit_code == 1, "training had begun"
    assert caught.value.message.startswith(f"{data}:111: keys found: text")
    assert "--skip-bad-rows" in caught.value.hint
    assert (tmp_path / "x" / "checkpoint-20").is_dir()


def test_steps_of_packed_data_are_those_of_its_rows(base, data, tmp_path):
    packed = train(base, data, tmp_path / "a", packing=True, max_length=400, epochs=1, batch_size=1)
    plain = train(base, data, tmp_path / "b", epochs=1, batch_size=1)
    assert packed["steps"] < plain["steps"] == 20
    assert packed["epochs"] == 1.0
    assert packed["tokens"] == plain["tokens"]
