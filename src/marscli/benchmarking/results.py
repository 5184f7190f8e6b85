"""One row of the comparison: what was set, what was counted, what was timed. Plain data and arithmetic, no torch.

A row is one method with its settings at one batch size. Its counts come from the first repeat (greedy decoding repeats
itself); its times are medians over the repeats, with the fastest and the slowest beside them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from marscli.benchmarking.config import SWEPT
from marscli.core.params import threshold_number


@dataclass(frozen=True)
class Setting:
    """A method with its parameters: a line of the table, less the batch size.

    Args:
        method: Name in the registry.
        threshold: τ, None is exact.
        block_size: Most tokens a forward may give; 1 for one-token decoding.
        draft_tokens: Masks a forward carries for a row.
        cache: Which key/value cache the method uses.
    """

    method: str
    threshold: float | None = None
    confidence: str = "probability"
    block_size: int = 1
    draft_tokens: int = 0
    cache: str = "row"

    @property
    def label(self) -> str:
        """``hf``, ``threshold exact``, ``threshold τ=0.95``."""
        if self.method not in SWEPT:
            return self.method
        if self.threshold is None:
            return f"{self.method} exact"
        measure = "" if self.confidence == "probability" else f" {self.confidence}"
        return f"{self.method}{measure} τ={self.threshold:g}"


@dataclass
class Pass:
    """One timed pass over all prompts.

    Args:
        outputs: Completion ids of each prompt, its end-of-sequence token included, nothing after it.
        forwards: Model calls in which the row had entries of its own, for each prompt.
        seconds: Wall time from prompt ids to completion ids.
        prefill_seconds: The part of ``seconds`` spent in the calls that read prompts.
        prefill_tokens: The completion tokens that those calls gave.
        peak_memory_mb: See ``memory.py``.
    """

    outputs: list[list[int]]
    forwards: list[int]
    seconds: float
    prefill_seconds: float
    prefill_tokens: int
    peak_memory_mb: float | None = None


@dataclass
class Cell:
    """A setting at one batch size, with the passes measured so far or the reason why there are none."""

    setting: Setting
    batch_size: int
    passes: list[Pass] = field(default_factory=list)
    skipped: str | None = None


FIELDS = (
    "method",
    "threshold",
    "confidence",
    "block_size",
    "draft_tokens",
    "cache",
    "batch_size",
    "prompts",
    "tokens",
    "forwards",
    "tokens_per_forward",
    "seconds",
    "seconds_min",
    "seconds_max",
    "tokens_per_second",
    "prefill_seconds",
    "decode_tokens_per_second",
    "speedup_vs_hf",
    "speedup_vs_ar",
    "agrees_with_ar",
    "first_difference",
    "accuracy",
    "peak_memory_mb",
    "repeats",
    "skipped",
)
"""Keys of a row in ``results.json``, columns of ``results.csv``; what a row lacks is null (an empty cell)."""


def table_rows(cells: Sequence[Cell], correct: Sequence[Any] | None = None) -> list[dict[str, Any]]:
    """Cells as the rows of ``results.json``.

    Args:
        cells: All cells; the baselines ``hf`` and ``ar`` are looked up among them at the same batch size.
        correct: One function a prompt, completion ids → whether the answer is right, or None where the prompt has no
            reference answer; None when no prompt has one.
    """
    measured = {(cell.setting.method, cell.batch_size): cell for cell in cells if cell.passes}
    return [
        _row(cell, measured.get(("hf", cell.batch_size)), measured.get(("ar", cell.batch_size)), correct)
        for cell in cells
    ]


def _row(cell: Cell, hf: Cell | None, ar: Cell | None, correct: Sequence[Any] | None) -> dict[str, Any]:
    setting = cell.setting
    row: dict[str, Any] = dict.fromkeys(FIELDS)
    row |= {
        "method": setting.method,
        "threshold": threshold_number(setting.threshold, setting.confidence),
        "confidence": setting.confidence,
        "block_size": setting.block_size,
        "draft_tokens": setting.draft_tokens,
        "cache": setting.cache,
        "batch_size": cell.batch_size,
        "repeats": len(cell.passes),
        "skipped": cell.skipped,
    }
    if not cell.passes:
        return row
    first = cell.passes[0]
    seconds = [one.seconds for one in cell.passes]
    tokens, forwards = count_tokens(first), sum(first.forwards)
    memory = [one.peak_memory_mb for one in cell.passes if one.peak_memory_mb is not None]
    row |= {
        "prompts": len(first.outputs),
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / forwards,
        "seconds": median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "tokens_per_second": speed(cell),
        "prefill_seconds": median(one.prefill_seconds for one in cell.passes),
        "decode_tokens_per_second": decode_speed(cell),
        "speedup_vs_hf": speed(cell) / speed(hf) if hf else None,
        "speedup_vs_ar": speed(cell) / speed(ar) if ar else None,
        "accuracy": _accuracy(first.outputs, correct),
        "peak_memory_mb": max(memory) if memory else None,
    }
    if ar:
        differences = [
            first_difference(ours, theirs) for ours, theirs in zip(first.outputs, ar.passes[0].outputs, strict=True)
        ]
        places = [place for place in differences if place is not None]
        row["agrees_with_ar"] = 1 - len(places) / len(differences)
        row["first_difference"] = sum(places) / len(places) if places else None
    return row


def count_tokens(one: Pass) -> int:
    return sum(len(output) for output in one.outputs)


def speed(cell: Cell) -> float:
    """Completion tokens a second of wall time, prompts' reading included; median over the repeats."""
    return median(count_tokens(one) / one.seconds for one in cell.passes)


def decode_speed(cell: Cell) -> float | None:
    """The same without the calls that read prompts and without the tokens that those gave; None if that is all."""
    rates = [
        (count_tokens(one) - one.prefill_tokens) / (one.seconds - one.prefill_seconds)
        for one in cell.passes
        if one.seconds > one.prefill_seconds and count_tokens(one) > one.prefill_tokens
    ]
    return median(rates) if rates else None


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ, None if they are the same.

    >>> first_difference([5, 6, 7], [5, 6])
    2
    """
    if list(ours) == list(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _accuracy(outputs: Sequence[Sequence[int]], correct: Sequence[Any] | None) -> float | None:
    if correct is None:
        return None
    marks = [check(output) for check, output in zip(correct, outputs, strict=True) if check is not None]
    return sum(marks) / len(marks) if marks else None


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as CSV text, columns in the order of ``FIELDS``."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
