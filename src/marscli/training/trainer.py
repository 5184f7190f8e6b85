"""`transformers.Trainer` with our objective: one level deep, everything else is the library's.

What differs: the loss (`objective`), its normalisation over the whole optimizer step, the order and layout of the data
(`batching`), the evaluation loss, and what is logged. Model, data and options are the caller's business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from marscli.core.attention import use_grouped_attention
from marscli.core.layout import TrainingBatch, TrainingExample, collate
from marscli.errors import MarsError
from marscli.training.batching import Pick, RowSampler, TrainingSet, curriculum
from marscli.training.objective import LossTerms, Objective, head_is_last, label_counts, step_loss, term_weights

# Share of the past in the running means that balance the terms: they look back over some twenty steps.
BALANCE_MEMORY = 0.95
MOST_BALANCE = 10.0  # a clean loss near zero shall not outweigh everything
FLEX_BLOCK = 128  # flex attention's blocks; a row of another width would be compiled anew


class TermBalance(TrainerCallback, ExportableState):
    """Running means of both terms, and the factor that makes the clean term as large as the masked one.

    Kept with the trainer's state, so that a resumed run goes on with the same numbers.
    """

    def __init__(self) -> None:
        self.means: list[float] | None = None

    def state(self) -> dict[str, Any]:
        """What the library saves."""
        return {"args": {}, "attributes": {"means": self.means}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take up the means of a resumed run."""
        saved: Any = state.stateful_callbacks or {}
        if type(self).__name__ in saved:
            self.means = saved[type(self).__name__]["attributes"]["means"]

    def update(self, masked: float, clean: float) -> None:
        """Take in one step's terms, in nats per label."""
        before = self.means or [masked, clean]
        self.means = [
            BALANCE_MEMORY * mean + (1 - BALANCE_MEMORY) * new
            for mean, new in zip(before, (masked, clean), strict=True)
        ]

    @property
    def factor(self) -> float:
        """By which the clean term is to be multiplied; 1 before anything is known."""
        if self.means is None:
            return 1.0
        masked, clean = self.means
        return min(max(masked / max(clean, 1e-9), 1 / MOST_BALANCE), MOST_BALANCE)


class MarsTrainer(Trainer):
    """Trains on a `TrainingSet` with the two-stream loss.

    Args:
        model: A causal LM with float32 weights.
        args: The library's arguments.
        train_set: The data; an iterable data set of `TrainingExample` with a ``block_size`` will do.
        eval_set: Held-out data for the evaluation loss.
        pad_token_id: Fills up batches; never seen by anything and never trained on.
        objective: What is minimised.
        packing: Put several examples into a row.
        max_length: Longest example in tokens; a packed row takes as many entries, or the longest example's if that has
            more.
        block_curriculum: Let the block size grow from 2 to B over the first half of the run.
        callbacks: The library's callbacks; `log` gives them our figures.
    """

    # Our loss is divided by the labels of the whole step already: the library must not divide it once more.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        *,
        model: nn.Module,
        args: TrainingArguments,
        train_set: TrainingSet,
        eval_set: TrainingSet | None = None,
        pad_token_id: int,
        objective: Objective,
        packing: bool = False,
        max_length: int = 512,
        block_curriculum: bool = False,
        callbacks: list[Any],
    ) -> None:
        flex = choose_attention(model, args.device) == "flex_attention"

        def to_batch(rows: list[TrainingExample]) -> dict[str, Any]:
            batch = collate(rows, pad_token_id, multiple_of=FLEX_BLOCK if flex else 1)
            return {**vars(batch), "entries": sum(map(len, rows))}

        self.balance = TermBalance() if objective.balance else None
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_set,
            eval_dataset=eval_set,
            data_collator=to_batch,
            callbacks=[*callbacks, self.balance] if self.balance else callbacks,
        )
        self.train_set = train_set
        self.objective = objective
        self.packing = packing
        self.max_length = max_length
        self.block_curriculum = block_curriculum
        self.largest_offset = train_set.block_size or 0
        self.head_is_last = head_is_last(model)
        self.entries_seen = 0
        self._start_window()
        self._start_step()

    def _start_window(self) -> None:
        """Begin to gather the figures of the next log line; they stay on the device until then."""
        device = self.args.device
        self._sums = torch.zeros(2, device=device)
        self._correct = torch.zeros(self.largest_offset + 1, dtype=torch.long, device=device)
        self._labels = torch.zeros_like(self._correct)
        self._window_entries = 0
        self._window_start = time.perf_counter()

    def _start_step(self) -> None:
        """Begin to gather what an optimizer step's forwards come to."""
        self._step_sums = torch.zeros(2, device=self.args.device)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[Pick]:
        lengths = self.train_set.lengths()
        return RowSampler(
            lengths,
            self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size,
            self.args.seed,
            capacity=max(self.max_length, *lengths) if self.packing else None,
            block_sizes=curriculum(self.largest_offset, self.args.max_steps) if self.block_curriculum else None,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor]:
        """Fetch the forwards of one optimizer step and count its labels by offset, over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._window_entries == 0:
            self._window_start = time.perf_counter()  # what was saved or loaded since the last line is no training
        counts = label_counts([_training_batch(batch) for batch in batches], self.largest_offset).to(device)
        if self.args.world_size > 1:
            counts = self.accelerator.reduce(counts, reduction="sum")
        return batches, counts

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        """The loss of one forward; ``num_items_in_batch`` are the counts of `get_batch_samples`."""
        assert num_items_in_batch is not None
        terms = self._terms(model, _training_batch(inputs), self._weights(num_items_in_batch))
        self._sums += terms.sums
        self._correct += terms.correct
        self._labels += label_counts([_training_batch(inputs)], self.largest_offset)
        self._window_entries += inputs["entries"]
        self._step_sums += terms.sums
        if self.accelerator.sync_gradients:
            self._end_step(num_items_in_batch)
        # Processes average their gradients, but the counts are of all of them together.
        return terms.loss * self.args.world_size

    def _weights(self, counts: Tensor) -> Tensor:
        factor = self.balance.factor if self.balance else 1.0
        return term_weights(counts, self.objective.ar_weight * factor)

    def _terms(
        self, model: nn.Module, batch: TrainingBatch, weights: Tensor, *, distill: bool | None = None
    ) -> LossTerms:
        # The library puts autocast around the model's own forward pass only; the mask is made before it.
        with self.accelerator.autocast():
            return step_loss(
                model,
                batch,
                weights,
                most_offsets=self.largest_offset,
                distill=self.objective.distill if distill is None else distill,
                head_is_last=self.head_is_last,
            )

    def _end_step(self, counts: Tensor) -> None:
        """Look at the terms of a whole optimizer step, once, before its update is made."""
        sums = self._step_sums
        self._start_step()
        if self.args.world_size > 1:
            sums = self.accelerator.reduce(sums, reduction="sum")
        masked, clean = (sums * term_weights(counts)).tolist()
        if not math.isfinite(masked + clean):
            raise MarsError(
                f"the loss is {masked + clean} at step {self.state.global_step + 1}",
                hint=f"start again with a lower --lr than {self.args.learning_rate:g}, a longer --warmup-ratio, or "
                "--dtype float32",
            )
        if self.balance:
            self.balance.update(masked, clean)

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss of the held-out data, in nats per label: the library's own evaluation would average means of batches.

        Returns:
            ``eval_loss``, ``eval_loss_masked`` (None for the AR objective) and ``eval_loss_clean``; always against the
            data's tokens, so that runs with and without distillation can be compared.
        """
        started = time.perf_counter()
        model = self.model.eval()
        sums = torch.zeros(2, device=self.args.device)
        counts = torch.zeros(self.largest_offset + 1, dtype=torch.long, device=self.args.device)
        for inputs in self.get_eval_dataloader(eval_dataset):
            batch = _training_batch(self._prepare_inputs(inputs))
            sums += self._terms(model, batch, torch.ones_like(sums), distill=False).sums
            counts += label_counts([batch], self.largest_offset)
        if self.args.world_size > 1:
            sums, counts = self.accelerator.reduce((sums, counts), reduction="sum")
        model.train()
        masked, clean = (sums * term_weights(counts)).tolist()
        metrics: dict[str, Any] = {
            f"{metric_key_prefix}_loss": masked + self.objective.ar_weight * clean,
            f"{metric_key_prefix}_loss_masked": masked if self.largest_offset else None,
            f"{metric_key_prefix}_loss_clean": clean,
        }
        self._window_start += time.perf_counter() - started  # the time is no training
        super().log(metrics, None)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: the library's estimate walks over all modules at every step."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Replace the library's figures of a training log line by ours."""
        if "learning_rate" not in logs:  # the library's closing summary
            return
        sums, correct, labels = self._sums, self._correct, self._labels
        entries = torch.tensor(self._window_entries, device=sums.device)
        if self.args.world_size > 1:
            sums, correct, labels, entries = self.accelerator.reduce((sums, correct, labels, entries), reduction="sum")
        masked, clean = (sums.double() / torch.stack([labels[1:].sum(), labels[0]]).clamp(min=1)).tolist()
        two_streams = self.train_set.block_size is not None
        accuracy = (correct / labels.clamp(min=1)).tolist()
        figures: dict[str, Any] = {
            "loss": masked + self.objective.ar_weight * clean,
            "loss_masked": masked if two_streams else None,
            "loss_clean": clean,
            "accuracy": {str(offset): round(value, 4) for offset, value in enumerate(accuracy)},
            "lr": logs["learning_rate"],
            "tokens_per_second": entries.item() / (time.perf_counter() - self._window_start),
        }
        self.entries_seen += int(entries.item())
        self._start_window()
        super().log(figures, None)


def choose_attention(model: Any, device: torch.device) -> str:
    """Set, and return, the attention that a model trains with on a device.

    On NVIDIA GPUs flex attention, which skips what the mask leaves out: half of everything, and in packed rows most.
    Elsewhere SDPA with the dense mask: flex attention has no backward pass on CPUs, and needs heads of 16 and more.
    """
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if device.type == "cuda" and head_dim >= 16:
        model.config._attn_implementation = "flex_attention"
    else:
        use_grouped_attention(model)
    return model.config._attn_implementation


def _training_batch(inputs: dict[str, Any]) -> TrainingBatch:
    return TrainingBatch(**{key: value for key, value in inputs.items() if key != "entries"})
