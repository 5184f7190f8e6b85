"""Which examples share a forward: their order, grouping by length, packing into rows, and each one's grid of blocks.

All of it is a function of the seed, the epoch and the place in the epoch alone, so a resumed run and another number of
processes meet the same rows. Knows lengths and layouts, no loss and no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from marscli.core.layout import TrainingExample, ar_example, pack, two_stream_example
from marscli.data.encoding import Encoded

# Rows are sorted by length within this many batches: enough that little padding is computed, few enough that a row
# still meets others than in the epoch before.
BATCHES_SORTED_TOGETHER = 50

# Share of padding in random batches from which grouping pays. Examples of one length are often of one kind, and a step
# over one kind is a worse step: where lengths differ little, random batches learn more from the same time.
PADDING_WORTH_GROUPING = 0.25

# Examples are packed among this many neighbours of a random order: with more, rows are hardly fuller.
EXAMPLES_PACKED_TOGETHER = 1024

SMALLEST_BLOCK = 2  # where a curriculum begins


class Pick(NamedTuple):
    """One row of the training data: the examples in it, and what their layout depends on."""

    examples: tuple[int, ...]
    epoch: int = 0
    block_size: int | None = None


class TrainingSet(Dataset):
    """Encoded examples, laid out as they are fetched.

    Args:
        examples: As `marscli.data` made them.
        block_size: B, or None for the AR objective.
        mask_token_id: The mask token; unused for the AR objective.
        random_offset: Draw the size of each example's first block anew in every epoch, so that every position is
            trained at every offset. Otherwise every response starts a full block, as in the paper.
        seed: Of these sizes.
    """

    def __init__(
        self,
        examples: Sequence[Encoded],
        *,
        block_size: int | None,
        mask_token_id: int | None,
        random_offset: bool = False,
        seed: int = 0,
    ) -> None:
        self.examples = examples
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.random_offset = random_offset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, pick: Pick | int) -> TrainingExample:
        if not isinstance(pick, Pick):
            pick = Pick((pick,))
        return pack([self.lay_out(self.examples[index], index, pick) for index in pick.examples])

    def lay_out(self, example: Encoded, index: int, pick: Pick) -> TrainingExample:
        """Lay out one example; ``index`` is its number in the data."""
        if self.block_size is None:
            return ar_example(example.ids, example.turns)
        assert self.mask_token_id is not None
        block_size = pick.block_size or self.block_size
        first_block = None
        if self.random_offset:
            draw = _generator(self.seed, pick.epoch, index)
            first_block = int(torch.randint(1, block_size + 1, (), generator=draw))
        return two_stream_example(
            example.ids,
            example.turns,
            block_size=block_size,
            mask_token_id=self.mask_token_id,
            first_block=first_block,
        )

    def lengths(self) -> list[int]:
        """Entries of each example: L + R, for the AR objective L."""
        masks = self.block_size is not None
        return [len(example.ids) + (example.response_tokens if masks else 0) for example in self.examples]


def _generator(*numbers: int) -> torch.Generator:
    """Random numbers that are a function of the given ones."""
    state = 0
    for number in numbers:
        state = (state * 1_000_003 + number + 1) % (2**63)
    return torch.Generator().manual_seed(state)


def pack_rows(lengths: Sequence[int], capacity: int, seed: int) -> list[tuple[int, ...]]:
    """Choose which examples share a row: the longest first, each into the fullest row that it still fits into.

    Args:
        lengths: Entries of each example.
        capacity: Entries of a row; an example that is longer has a row of its own.
        seed: Of the neighbours that are packed together.
    """
    rows: list[tuple[int, ...]] = []
    for chunk in torch.randperm(len(lengths), generator=_generator(seed)).split(EXAMPLES_PACKED_TOGETHER):
        open_rows: list[tuple[int, list[int]]] = []  # (entries left, examples)
        for index in sorted(chunk.tolist(), key=lambda i: -lengths[i]):
            fitting = [n for n, (left, _) in enumerate(open_rows) if left >= lengths[index]]
            if fitting:
                fullest = min(fitting, key=lambda n: open_rows[n][0])
                left, members = open_rows[fullest]
                open_rows[fullest] = left - lengths[index], [*members, index]
            else:
                open_rows.append((capacity - lengths[index], [index]))
        rows += [tuple(members) for _, members in open_rows]
    return rows


class RowSampler(Sampler[Pick]):
    """Rows in random order; batches of like length where random ones would be mostly padding.

    Args:
        lengths: Entries of each example.
        batch_size: Rows of one optimizer step, over all processes.
        seed: Of the order.
        capacity: Pack examples into rows of this many entries; None gives every example a row.
        block_sizes: Block size of each optimizer step of the run, for a curriculum; None leaves the data's own.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        seed: int,
        *,
        capacity: int | None = None,
        block_sizes: Sequence[int] | None = None,
    ) -> None:
        self.rows = pack_rows(lengths, capacity, seed) if capacity else [(index,) for index in range(len(lengths))]
        self.lengths = torch.tensor([sum(lengths[index] for index in row) for row in self.rows])
        self.batch_size = batch_size
        self.seed = seed
        self.block_sizes = block_sizes
        self.epoch = 0
        self.groups = self._padding(self._shuffled(0)) > PADDING_WORTH_GROUPING

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; accelerate calls it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Pick]:
        order = self._shuffled(self.epoch)
        if self.groups:
            order = self._grouped(order)
        first_step = self.epoch * math.ceil(len(self.rows) / self.batch_size)
        for place, row in enumerate(order.tolist()):
            block_size = None
            if self.block_sizes:
                step = first_step + place // self.batch_size
                block_size = self.block_sizes[min(step, len(self.block_sizes) - 1)]
            yield Pick(self.rows[row], self.epoch, block_size)

    def _shuffled(self, epoch: int) -> Tensor:
        return torch.randperm(len(self.rows), generator=_generator(self.seed, epoch))

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
        places = torch.randperm(len(full), generator=_generator(self.seed, self.epoch)).tolist()
        return torch.cat([full[place] for place in places] + [b for b in batches if len(b) < self.batch_size])


def curriculum(block_size: int, steps: int) -> list[int]:
    """Block size of each step: from 2 up to B in equal parts of the run's first half, B from there on.

    Example:
        >>> curriculum(4, 12)
        [2, 2, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4]
    """
    sizes = range(min(SMALLEST_BLOCK, block_size), block_size + 1)
    return [sizes[min(2 * step * len(sizes) // steps, len(sizes) - 1)] for step in range(steps)]
