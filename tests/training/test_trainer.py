"""The Trainer subclass: accumulation, the order of the data, what is logged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from marscli.data.encoding import Encoded
from marscli.training.trainer import LengthGroupedSampler, MarsTrainer, TrainingSet
from tiny_chat import make_model


def examples(count=16):
    generator = np.random.default_rng(0)
    made = []
    for n in range(count):
        prompt, response = 3 + n % 5, 2 + (7 * n) % 13
        ids = np.append(generator.integers(4, 260, prompt + response - 1), 2)
        made.append(Encoded(ids, ((prompt, prompt + response),)))
    return made


class Gradients(TrainerCallback):
    """Keeps each step's gradients and log lines."""

    def __init__(self):
        self.steps, self.logs = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append([p.grad.clone() for p in model.parameters()])

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def train(tmp_path, *, batch_size, grad_accum, block_size=4, steps=3, ar_weight=0.5, data=None):
    kept = Gradients()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=grad_accum,
        learning_rate=1e-3,
        logging_steps=1,
        max_grad_norm=1e9,
        save_strategy="no",
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = MarsTrainer(
        model=make_model(),
        args=arguments,
        train_set=TrainingSet(data or examples(), block_size=block_size, mask_token_id=3),
        pad_token_id=2,
        ar_weight=ar_weight,
        callbacks=[kept],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return kept, trainer


@pytest.mark.parametrize("block_size", [4, None])
def test_one_by_four_equals_four_by_one(tmp_path, block_size):
    """Forwards of unequal numbers of labels: a mean a forward would differ."""
    whole, _ = train(tmp_path, batch_size=4, grad_accum=1, block_size=block_size)
    parts, _ = train(tmp_path, batch_size=1, grad_accum=4, block_size=block_size)
    for a, b in zip(whole.steps, parts.steps, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=0)
    for a, b in zip(whole.logs, parts.logs, strict=True):
        for key in ("loss", "loss_masked", "loss_clean"):
            assert a[key] == (pytest.approx(b[key], abs=1e-5) if b[key] is not None else None)
        assert a["accuracy"] == b["accuracy"]


def test_log_lines(tmp_path):
    kept, trainer = train(tmp_path, batch_size=4, grad_accum=1)
    assert len(kept.logs) == 3
    for line in kept.logs:
        assert set(line) == {"loss", "loss_masked", "loss_clean", "accuracy", "lr", "tokens_per_second", "epoch"}
        assert line["loss"] == pytest.approx(line["loss_masked"] + 0.5 * line["loss_clean"])
        assert set(line["accuracy"]) == {"0", "1", "2", "3", "4"}
        assert line["tokens_per_second"] > 0
    data = trainer.train_set
    batches = list(LengthGroupedSampler(data.lengths(), 4, 42))[:12]
    assert trainer.entries_seen == sum(data.lengths()[i] for i in batches)


def test_a_data_set_of_one_row_trains(tmp_path):
    kept, _ = train(tmp_path, batch_size=4, grad_accum=2, data=examples(1))
    assert len(kept.steps) == 3
    assert kept.logs[-1]["loss"] < kept.logs[0]["loss"]


def test_order_groups_lengths_and_depends_on_seed_and_epoch_alone():
    lengths = torch.randint(5, 200, (203,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = LengthGroupedSampler(lengths, 8, seed=1)
    order = list(sampler)
    assert sorted(order) == list(range(203))
    assert order == list(LengthGroupedSampler(lengths, 8, seed=1))
    sampler.set_epoch(1)
    assert list(sampler) != order
    spread = [
        max(group) - min(group)
        for group in ([lengths[i] for i in order[start : start + 8]] for start in range(0, 200, 8))
    ]
    assert max(spread) < 30


def test_lengths_that_differ_little_are_not_grouped():
    """Examples of one length are often of one kind."""
    lengths = torch.randint(80, 120, (160,), generator=torch.Generator().manual_seed(0)).tolist()
    order = list(LengthGroupedSampler(lengths, 8, seed=1))
    assert sorted(order) == list(range(160))
    spread = [
        max(lengths[i] for i in order[s : s + 8]) - min(lengths[i] for i in order[s : s + 8]) for s in range(0, 160, 8)
    ]
    assert sum(spread) / len(spread) > 20
