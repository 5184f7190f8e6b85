"""Encoded examples in memory: a few flat arrays, four bytes a token, instead of some objects an example."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from marscli.data.encoding import Encoded


class ExampleStore(Sequence[Encoded]):
    """A sequence of examples that is only ever appended to."""

    def __init__(self) -> None:
        self._ids = array("i")
        self._turns = array("i")  # start, end, start, end, …
        self._id_ends = array("q", [0])
        self._turn_ends = array("q", [0])

    def append(self, example: Encoded) -> None:
        """Add one example."""
        self._ids.frombytes(example.ids.astype(np.int32).tobytes())
        for turn in example.turns:
            self._turns.extend(turn)
        self._id_ends.append(len(self._ids))
        self._turn_ends.append(len(self._turns))

    def __len__(self) -> int:
        return len(self._id_ends) - 1

    def __getitem__(self, index: int) -> Encoded:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids = np.array(self._ids[self._id_ends[index] : self._id_ends[index + 1]], dtype=np.int64)
        turns = self._turns[self._turn_ends[index] : self._turn_ends[index + 1]]
        return Encoded(ids, tuple(zip(turns[::2], turns[1::2], strict=True)))
