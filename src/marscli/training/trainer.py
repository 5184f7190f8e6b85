"""`transformers.Trainer` with our objective: one level deep, everything else is the library's.

What differs: the loss (`objective`), its normalisation over the whole optimizer step, the order of the data, and what
is logged. Model, data and options are the caller's business.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainingArguments

from marscli.core.layout import TrainingBatch, TrainingExample, ar_example, collate, two_stream_example
from marscli.data.encoding import Encoded
from marscli.errors import MarsError
from marscli.training.objective import label_counts, step_logits, two_stream_loss

# Examples are sorted by length within this many batches: enough that little padding is computed, few enough that an
# example still meets others than in the epoch before.
BATCHES_SORTED_TOGETHER = 50

# Share of padding in random batches from which grouping pays. Examples of one length are often of one kind, and a step
# over one kind is a worse step: where lengths differ little, random batches learn more from the same time.
PADDING_WORTH_GROUPING = 0.25


class TrainingSet(Dataset):
    """Encoded examples, laid out as they are fetched.

    Args:
        examples: As `marscli.data` made them.
        block_size: B, or None for the AR objective.
        mask_token_id: The mask token; unused for the AR objective.
    """

    def __init__(self, examples: Sequence[Encoded], *, block_size: int | None, mask_token_id: int | None) -> None:
        self.examples = examples
        self.block_size = block_size
        self.mask_token_id = mask_token_id

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> TrainingExample:
        example = self.examples[index]
        if self.block_size is None:
            return ar_example(example.ids, example.turns)
        assert self.mask_token_id is not None
        return two_stream_example(
            example.ids, example.turns, block_size=self.block_size, mask_token_id=self.mask_token_id
        )

    def lengths(self) -> list[int]:
        """Entries of each example: L + R, for the AR objective L."""
        masks = self.block_size is not None
        return [len(example.ids) + (example.response_tokens if masks else 0) for example in self.examples]


class LengthGroupedSampler(Sampler[int]):
    """Examples in random order; batches of like length where random ones would be mostly padding.

    The order is a function of seed and epoch alone, so a resumed run meets it again.

    Args:
        lengths: Length of each example.
        batch_size: Examples of one optimizer step.
        seed: Of the order.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self.groups = self._padding(self._shuffled(0)) > PADDING_WORTH_GROUPING

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; accelerate calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = self._shuffled(self.epoch)
        return iter((self._grouped(order) if self.groups else order).tolist())

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)

    def _shuffled(self, epoch: int) -> Tensor:
        return torch.randperm(len(self.lengths), generator=self._generator(epoch))

    def _padding(self, order: Tensor) -> float:
        """Share of padding in the batches of an order."""
        batches = self.lengths[order].split(self.batch_size)
        computed = sum(int(batch.max()) * len(batch) for batch in batches)
        return 1 - int(self.lengths.sum()) / max(computed, 1)

    def _grouped(self, order: Tensor) -> Tensor:
        batches: list[Tensor] = []
        for chunk in order.split(self.batch_size * BATCHES_SORTED_TOGETHER):
            batches += chunk[self.lengths[chunk].argsort(stable=True)].split(self.batch_size)
        # Only the last batch may be smaller, or all after it would be cut at other places.
        full = [batch for batch in batches if len(batch) == self.batch_size]
        places = torch.randperm(len(full), generator=self._generator(self.epoch)).tolist()
        return torch.cat([full[place] for place in places] + [b for b in batches if len(b) < self.batch_size])


class MarsTrainer(Trainer):
    """Trains on `TrainingSet` with the two-stream loss.

    Args:
        model: A causal LM with float32 weights.
        args: The library's arguments.
        train_set: The data.
        pad_token_id: Fills up batches; never seen by anything and never trained on.
        ar_weight: Weight of the clean term.
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
        pad_token_id: int,
        ar_weight: float,
        callbacks: list[Any],
    ) -> None:
        def to_batch(examples: list[TrainingExample]) -> dict[str, Any]:
            return {**vars(collate(examples, pad_token_id)), "entries": sum(map(len, examples))}

        super().__init__(model=model, args=args, train_dataset=train_set, data_collator=to_batch, callbacks=callbacks)
        self.train_set = train_set
        self.ar_weight = ar_weight
        self.largest_offset = train_set.block_size or 0
        self.entries_seen = 0
        self._start_window()

    def _start_window(self) -> None:
        """Begin to gather the figures of the next log line; they stay on the device until then."""
        device = self.args.device
        self._sums = torch.zeros(2, device=device)
        self._correct = torch.zeros(self.largest_offset + 1, dtype=torch.long, device=device)
        self._labels = torch.zeros_like(self._correct)
        self._window_entries = 0
        self._window_start = time.perf_counter()

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGroupedSampler(self.train_set.lengths(), batch_size, self.args.seed)

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
        logits, targets, offsets = step_logits(model, _training_batch(inputs))
        terms = two_stream_loss(logits, targets, offsets, num_items_in_batch, ar_weight=self.ar_weight)
        self._sums += terms.sums
        self._correct += terms.correct
        self._labels += torch.bincount(offsets, minlength=self.largest_offset + 1)
        self._window_entries += inputs["entries"]
        if not torch.isfinite(terms.loss):
            raise MarsError(
                f"the loss is {terms.loss.item()} at step {self.state.global_step + 1}",
                hint=f"start again with a lower --lr than {self.args.learning_rate:g}, a longer --warmup-ratio, or "
                "--dtype float32",
            )
        # Processes average their gradients, but the counts are of all of them together.
        return terms.loss * self.args.world_size

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
            "loss": masked + self.ar_weight * clean,
            "loss_masked": masked if two_streams else None,
            "loss_clean": clean,
            "accuracy": {str(offset): round(value, 4) for offset, value in enumerate(accuracy)},
            "lr": logs["learning_rate"],
            "tokens_per_second": entries.item() / (time.perf_counter() - self._window_start),
        }
        self.entries_seen += int(entries.item())
        self._start_window()
        super().log(figures, None)


def _training_batch(inputs: dict[str, Any]) -> TrainingBatch:
    return TrainingBatch(**{key: value for key, value in inputs.items() if key != "entries"})
