"""The Trainer subclass: accumulation, evaluation, balance and distillation, what is logged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from marscli.core.layout import collate
from marscli.data.encoding import Encoded
from marscli.errors import MarsError
from marscli.training.batching import RowSampler, TrainingSet
from marscli.training.objective import Objective, label_counts, step_loss, term_weights
from marscli.training.trainer import MarsTrainer, TermBalance
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


def train(
    tmp_path,
    *,
    batch_size,
    grad_accum,
    block_size=4,
    steps=3,
    data=None,
    model=None,
    random_offset=False,
    ar_weight=0.5,
    distill=False,
    balance=False,
    eval_batch_size=8,
    **options,
):
    kept = Gradients()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=eval_batch_size,
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
        model=model or make_model(),
        args=arguments,
        train_set=TrainingSet(data or examples(), block_size=block_size, mask_token_id=3, random_offset=random_offset),
        pad_token_id=2,
        objective=Objective(ar_weight=ar_weight, distill=distill, balance=balance),
        callbacks=[kept],
        **options,
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
    picks = list(RowSampler(data.lengths(), 4, 42))[:12]
    assert trainer.entries_seen == sum(data.lengths()[i] for pick in picks for i in pick.examples)


def test_a_data_set_of_one_row_trains(tmp_path):
    kept, _ = train(tmp_path, batch_size=4, grad_accum=2, data=examples(1))
    assert len(kept.steps) == 3
    assert kept.logs[-1]["loss"] < kept.logs[0]["loss"]


@pytest.mark.parametrize("packing", [False, True])
def test_what_is_drawn_for_a_run_is_drawn_again(tmp_path, packing):
    """Two runs of the same seed take the same steps, whatever is drawn for them."""
    options = {"packing": packing, "random_offset": True, "block_curriculum": True}
    first, _ = train(tmp_path, batch_size=2, grad_accum=2, **options)
    second, _ = train(tmp_path, batch_size=2, grad_accum=2, **options)
    assert [log["loss"] for log in first.logs] == [log["loss"] for log in second.logs]


def test_packing_trains_on_every_example(tmp_path):
    """Sixteen examples in few rows: an epoch is as many labels as without."""
    plain, whole = train(tmp_path, batch_size=16, grad_accum=1, steps=1)
    packed, trainer = train(tmp_path, batch_size=16, grad_accum=1, steps=1, packing=True, max_length=60)
    assert len(trainer.get_train_dataloader().dataset) == 16
    assert trainer.entries_seen == whole.entries_seen
    assert packed.logs[0]["loss"] == pytest.approx(plain.logs[0]["loss"], abs=1e-5)
    for a, b in zip(plain.steps[0], packed.steps[0], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_evaluation_is_a_mean_over_labels(tmp_path):
    """However the held-out examples are batched, their loss is the sum over labels by the number of labels."""
    held_out = TrainingSet(examples(7), block_size=4, mask_token_id=3)
    _, trainer = train(tmp_path, batch_size=4, grad_accum=1, steps=1, eval_set=held_out, eval_batch_size=2)
    metrics = trainer.evaluate()
    batch = collate([held_out[i] for i in range(7)], 2)
    weights = term_weights(label_counts([batch], 4))
    with torch.no_grad():
        terms = step_loss(trainer.model, batch, weights, most_offsets=4)
    masked, clean = (terms.sums * weights).tolist()
    assert metrics["eval_loss_masked"] == pytest.approx(masked, abs=1e-5)
    assert metrics["eval_loss_clean"] == pytest.approx(clean, abs=1e-5)
    assert metrics["eval_loss"] == pytest.approx(masked + 0.5 * clean, abs=1e-5)
    assert trainer.model.training


def test_distillation_logs_the_distance_to_the_clean_stream(tmp_path):
    plain, _ = train(tmp_path, batch_size=4, grad_accum=1, steps=1)
    distilled, _ = train(tmp_path, batch_size=4, grad_accum=1, steps=1, distill=True)
    assert distilled.logs[0]["loss_clean"] == plain.logs[0]["loss_clean"]
    assert distilled.logs[0]["loss_masked"] != plain.logs[0]["loss_masked"]
    assert distilled.logs[0]["accuracy"] == plain.logs[0]["accuracy"]


def test_balance_scales_the_clean_term_to_the_masked_one():
    balance = TermBalance()
    assert balance.factor == 1.0
    for _ in range(300):
        balance.update(3.0, 1.5)
    assert balance.factor == pytest.approx(2.0)
    balance.update(3.0, 0.0)
    assert balance.factor < 3
    for _ in range(300):
        balance.update(3.0, 0.0)
    assert balance.factor == 10.0


def test_balance_changes_the_steps_after_the_first(tmp_path):
    plain, _ = train(tmp_path, batch_size=4, grad_accum=1, ar_weight=0.2)
    balanced, trainer = train(tmp_path, batch_size=4, grad_accum=1, ar_weight=0.2, balance=True)
    for a, b in zip(plain.steps[0], balanced.steps[0], strict=True):
        assert torch.equal(a, b)
    assert any(not torch.equal(a, b) for a, b in zip(plain.steps[1], balanced.steps[1], strict=True))
    assert trainer.balance.state()["attributes"]["means"] == trainer.balance.means


def test_a_loss_that_is_no_number_stops_before_the_update(tmp_path):
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.inf
    with pytest.raises(MarsError, match=r"the loss is .* at step 1"):
        train(tmp_path, batch_size=2, grad_accum=2, model=model)
