"""Jacobi decoding (arXiv 2305.10427), for comparison: an AR model verifies guesses of its own, without training.

A step runs the newest token and guesses for the tokens after it. Those that equal AR decoding's choice are kept, and
one token more, as in verified decoding; the predictions behind the first wrong guess, made from that wrong guess, are
the next step's guesses. No masks, so any model will do, and the output is AR decoding's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from marscli.core.decoding import Engine, Row
from marscli.core.params import DecodingParams
from marscli.core.step import StepPlan


class JacobiEngine(Engine):
    """`Engine` with guesses in the place of masks: as many as ``draft_tokens``, or B − 1.

    A guess that was right has its place among the step's guesses as its offset: 1, 2, …
    """

    def _check(self, params: DecodingParams) -> None:
        if not params.exact:
            raise ValueError("Jacobi decoding is exact: it has no threshold")

    def _plan(self, rows: Sequence[Row], prefill: bool) -> StepPlan:
        spare = np.array([row.room(self.context_length) - 1 for row in rows])
        guesses = []
        for row, most in zip(rows, spare.tolist(), strict=True):
            wanted = row.params.block_size - 1 if row.params.draft_tokens is None else row.params.draft_tokens
            kept = (row.drafts + [row.newest[-1]] * wanted)[: min(wanted, most)]
            row.drafts, row.draft_offsets = kept, list(range(1, len(kept) + 1))
            guesses.append(kept)
        return StepPlan(
            newest=[row.newest for row in rows],
            drafts=guesses,
            cached=np.array([row.cached for row in rows]),
            groups=np.zeros((len(rows), max(map(len, guesses)) + 1), dtype=np.int64),
            spare=spare,
            guesses=True,
        )
