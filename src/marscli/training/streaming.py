"""Training data that is read while it is trained on, for sets larger than memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.utils.data import IterableDataset

from marscli.core.layout import TrainingExample
from marscli.data.prepare import ExampleReader
from marscli.training.batching import Pick, TrainingSet


class TrainingStream(IterableDataset):
    """An endless stream of laid-out examples; the same one again each time it is iterated over.

    A resumed run goes through what was consumed once more, without training on it.

    Args:
        reader: Of the rows.
        layout: Lays examples out; holds none itself.
        seed: Of the order.
        examples_a_step: Examples of one optimizer step, over all processes.
        block_sizes: Block size of each step, for a curriculum; None leaves the layout's own.
    """

    def __init__(
        self,
        reader: ExampleReader,
        layout: TrainingSet,
        *,
        seed: int,
        examples_a_step: int,
        block_sizes: Sequence[int] | None = None,
    ) -> None:
        self.reader = reader
        self.layout = layout
        self.seed = seed
        self.examples_a_step = examples_a_step
        self.block_sizes = block_sizes
        self.block_size = layout.block_size

    def __iter__(self) -> Iterator[TrainingExample]:
        for number, example in enumerate(self.reader.stream(self.seed)):
            block_size = None
            if self.block_sizes:
                block_size = self.block_sizes[min(number // self.examples_a_step, len(self.block_sizes) - 1)]
            yield self.layout.lay_out(example, number, Pick((number,), block_size=block_size))
