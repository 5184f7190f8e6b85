"""Training data that is read while it is trained on, for sets larger than memory."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import IterableDataset

from marscli.core.layout import TrainingExample, ar_example, two_stream_example
from marscli.data.prepare import ExampleReader


class TrainingStream(IterableDataset):
    """An endless stream of laid-out examples; the same one again each time it is iterated over.

    A resumed run goes through what was consumed once more, without training on it. What `TrainingSet` is to data in
    memory, for `MarsTrainer`.

    Args:
        reader: Of the rows.
        block_size: B, or None for the AR objective.
        mask_token_id: The mask token; unused for the AR objective.
        seed: Of the order.
    """

    def __init__(self, reader: ExampleReader, *, block_size: int | None, mask_token_id: int | None, seed: int) -> None:
        self.reader = reader
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.seed = seed

    def __iter__(self) -> Iterator[TrainingExample]:
        for example in self.reader.stream(self.seed):
            if self.block_size is None:
                yield ar_example(example.ids, example.turns)
            else:
                assert self.mask_token_id is not None
                yield two_stream_example(
                    example.ids, example.turns, block_size=self.block_size, mask_token_id=self.mask_token_id
                )
