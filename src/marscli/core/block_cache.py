"""The block-level cache of the paper (arXiv 2604.07023), for comparison: rows move in blocks, together.

The batch's prompts are cached once. Within a block of C tokens each step runs all C positions of every row again, the
tokens it has so far and masks behind them, against the cached prefix; kept are tokens as in `Engine` without
verification, up to the block's end. A row whose block is full waits for the slowest row; then the full blocks are run
once more, to cache them. A new batch begins when the last row of the old one has ended.

The steps that read the prompts and that cache a block give each row one token, which begins its next block: their
newest logits are there anyway. Where the published code copies the whole cache in every step, this copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from marscli.core.decoding import Engine, Outcome, Request, Row
from marscli.core.step import StepPlan


class BlockEngine(Engine):
    """`Engine` with the paper's cache. Requests are decoded as if ``verify`` were off.

    Args:
        model: See `Engine`, as for ``options``.
        cache_block: C, tokens a block.
    """

    def __init__(self, model: nn.Module, *, cache_block: int = 32, **options: Any) -> None:
        if cache_block < 1:
            raise ValueError(f"a block of {cache_block} tokens")
        super().__init__(model, **options)
        self.cache_block = cache_block
        self._all_full = False
        self._still_reading = False

    def add(self, request: Request) -> int:
        """See `Engine.add`."""
        return super().add(replace(request, params=replace(request.params, verify=False)))

    def set_params(self, request_id: int, **changes: Any) -> None:
        """See `Engine.set_params`."""
        super().set_params(request_id, **{**changes, "verify": False})

    def _admit(self) -> None:
        # Prompts of unlike lengths are read in several steps; the blocks begin when the batch is complete.
        if not self._rows or self._still_reading:
            super()._admit()
            self._still_reading = bool(self._queue) and len(self._rows) < self.max_rows

    def _is_full(self, row: Row) -> bool:
        return row.cached > 0 and len(row.newest) == self.cache_block

    def _plan(self, rows: Sequence[Row], prefill: bool) -> StepPlan:
        self._all_full = not prefill and all(self._is_full(row) for row in rows)
        spare = np.array([row.room(self.context_length) - 1 for row in rows])
        behind = np.array([self.cache_block - len(row.newest) - 1 for row in rows])
        masks = np.minimum(np.minimum(self._settings.masks, behind), spare).clip(min=0)
        if prefill or self._all_full:
            masks = np.zeros_like(masks)
        return StepPlan(
            newest=[row.newest for row in rows],
            drafts=[[] for _ in rows],
            cached=np.array([row.cached for row in rows]),
            groups=masks[:, None],
            spare=spare,
            width=None if prefill else self.cache_block,
        )

    def _advance(self, row: Row, outcome: Outcome) -> bool:
        if row.cached == 0 or self._all_full:
            row.cached += len(row.newest)
            row.newest = list(outcome.tokens)
        elif self._is_full(row):
            return False
        else:
            row.newest = row.newest + outcome.tokens
        row.generated += len(outcome.tokens)
        return True
