"""Held-out data: its loss on the way, early stopping, and what the picture and the card say of it."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import train
from transformers import TrainingArguments

import marscli
from marscli.data.encoding import Encoder
from marscli.data.prepare import ExampleReader
from marscli.training.batching import TrainingSet
from marscli.training.callbacks import read_log
from marscli.training.objective import Objective
from marscli.training.plot import plot_training
from marscli.training.trainer import MarsTrainer
from tiny_chat import make_tokenizer, sums, write_rows


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "held.jsonl", sums(26)[20:])


def test_the_loss_is_measured_on_the_way(base, data, held_out, tmp_path):
    summary = train(base, data, tmp_path / "x", max_steps=5, eval_dataset=str(held_out), eval_steps=2)
    lines = [line for line in read_log(tmp_path / "x" / "train_log.jsonl") if "eval_loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert all(
        line["eval_loss"] == pytest.approx(line["eval_loss_masked"] + line["eval_loss_clean"], rel=1e-4)
        for line in lines
    )
    assert summary["eval_loss"] == lines[-1]["eval_loss"] < lines[0]["eval_loss"]
    assert "held-out loss" in (tmp_path / "x" / "README.md").read_text()
    # The clean stream is plain language modelling: by hand, the same figure in nats per response token.
    checkpoint = marscli.load(tmp_path / "x", dtype="float32")
    examples = ExampleReader([str(held_out)], Encoder(make_tokenizer(), [2]), max_length=512).read_all()
    total = count = 0
    for example in examples:
        ids = torch.tensor(example.ids)
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(
                checkpoint.model(ids[None, :-1]).logits[0], ids[1:], reduction="none"
            )
        for start, end in example.turns:
            total, count = total + losses[start - 1 : end - 1].sum().item(), count + end - start
    assert lines[-1]["eval_loss_clean"] == pytest.approx(total / count, abs=1e-4)
    plain = train(base, data, tmp_path / "y", max_steps=5)
    assert plain["loss"] == summary["loss"], "measuring changes nothing"
    assert plain["eval_loss"] is None


def test_early_stopping_gives_back_the_best_checkpoint(base, data, held_out, tmp_path, caplog):
    """A learning rate that destroys the model: the best is an early checkpoint."""
    options = {"lr": 0.3, "eval_dataset": str(held_out), "eval_steps": 2, "early_stopping": 2, "warmup_ratio": 0.0}
    with caplog.at_level("INFO", logger="marscli"):
        summary = train(base, data, tmp_path / "x", max_steps=60, **options)
    losses = {
        line["step"]: line["eval_loss"] for line in read_log(tmp_path / "x" / "train_log.jsonl") if "eval_loss" in line
    }
    best = min(losses, key=losses.__getitem__)
    assert summary["steps"] == best + 4 < 60
    assert summary["best_step"] == best
    assert f"stopped early, at step {best + 4} of 60; the checkpoint of step {best} is the best" in caplog.text
    assert not list((tmp_path / "x").glob("checkpoint-*"))
    assert measured(tmp_path / "x", held_out) == pytest.approx(losses[best], abs=1e-3)


def measured(folder, held_out):
    """Both terms of a checkpoint's held-out loss."""
    checkpoint = marscli.load(folder, dtype="float32")
    examples = ExampleReader([str(held_out)], Encoder(make_tokenizer(), [2]), max_length=512).read_all()
    layout = TrainingSet(examples, block_size=4, mask_token_id=3)
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, remove_unused_columns=False, report_to="none")
    trainer = MarsTrainer(
        model=checkpoint.model,
        args=arguments,
        train_set=layout,
        eval_set=layout,
        pad_token_id=2,
        objective=Objective(),
        callbacks=[],
    )
    return trainer.evaluate()["eval_loss"]


def test_the_picture_has_points_of_the_held_out_loss(tmp_path):
    line = {"loss": 2.0, "loss_masked": 1.2, "loss_clean": 0.8, "accuracy": {"0": 0.5, "1": 0.4}}
    entries = [{"step": step, **line} for step in range(1, 30)]
    plot_training(entries, tmp_path / "a.png", title="t")
    points = [{"step": 10 * n, "eval_loss": 2.1, "eval_loss_masked": 1.3, "eval_loss_clean": 0.8} for n in (1, 2)]
    plot_training([*entries, *points], tmp_path / "b.png", title="t")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()
