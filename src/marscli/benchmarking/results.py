"""One row of the comparison: what was set, what was counted, what was timed. Plain data and arithmetic, no torch.

A row is one method with its settings at one batch size. Its counts come from the first repeat (greedy decoding repeats
itself); its times are medians over the repeats, with the fastest and the slowest beside them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from marscli.benchmarking.config import SWEPT
from marscli.core.params import threshold_number

Check = Callable[[Sequence[int]], bool]
"""Completion ids → whether the answer is right."""


@dataclass(frozen=True)
class Setting:
    """A method with its parameters: a line of the table, less the batch size.

    Args:
        method: Its name.
        threshold: τ, None is exact.
        confidence: What τ is compared with.
        block_size: Most tokens a forward may give; 1 for one-token decoding.
        draft_tokens: Masks a group, or guesses; None where the engine chooses.
        cache: Which key/value cache the method uses.
        cache_block: Tokens a block of the block cache; None for other caches.
        compile: Compile the model's calls.
    """

    method: str
    threshold: float | None = None
    confidence: str = "probability"
    block_size: int = 1
    draft_tokens: int | None = 0
    cache: str = "row"
    cache_block: int | None = None
    compile: bool = False

    @property
    def label(self) -> str:
        """``hf``, ``threshold exact``, ``verified τ=0.95``, ``block-cache 32 margin τ=0.5``."""
        return label(
            {
                "method": self.method,
                "threshold": threshold_number(self.threshold, self.confidence),
                "confidence": self.confidence,
                "cache_block": self.cache_block,
            }
        )


def is_exact(row: Mapping[str, Any]) -> bool:
    """Whether a row keeps nothing unverified."""
    return bool(row["threshold"] == threshold_number(None, row["confidence"]))


def tau_label(row: Mapping[str, Any]) -> str:
    """``exact`` or ``τ=0.95``."""
    return "exact" if is_exact(row) else f"τ={row['threshold']:g}"


def line_label(row: Mapping[str, Any]) -> str:
    """What the rows share that differ in τ alone: ``threshold``, ``block-cache 32 margin``."""
    measure = "" if row["confidence"] == "probability" or is_exact(row) else row["confidence"]
    return " ".join(str(part) for part in (row["method"], row.get("cache_block"), measure) if part)


def label(row: Mapping[str, Any]) -> str:
    """A row's name in tables and pictures."""
    return f"{line_label(row)} {tau_label(row)}" if row["method"] in SWEPT else line_label(row)


@dataclass
class Pass:
    """One timed pass over all prompts.

    Args:
        outputs: Completion ids of each prompt, its end-of-sequence token included, nothing after it.
        forwards: Model calls in which the row had entries of its own, for each prompt.
        seconds: Wall time from prompt ids to completion ids.
        prefill_seconds: The part of ``seconds`` spent in the calls that read prompts.
        prefill_tokens: The completion tokens that those calls gave.
        first_token_seconds: From the start of the call that reads a prompt to its end, median over the prompts.
        steps: Calls of the model that read no prompt, all rows together.
        step_width: Entries that such a call ran for each row, mean; None without such calls.
        tokens_by_offset: Completion tokens predicted at offset 0, 1, 2 …; None where the method does not tell.
        peak_memory_mb: See ``memory.py``.
    """

    outputs: list[list[int]]
    forwards: list[int]
    seconds: float
    prefill_seconds: float
    prefill_tokens: int
    first_token_seconds: float = 0.0
    steps: int = 0
    step_width: float | None = None
    tokens_by_offset: list[int] | None = None
    peak_memory_mb: float | None = None


@dataclass
class Cell:
    """A setting at one batch size, with the passes measured so far or the reason why there are none."""

    setting: Setting
    batch_size: int
    passes: list[Pass] = field(default_factory=list)
    skipped: str | None = None
    largest_margin: float | None = None  # see ``margins.py``


FIELDS = (
    "method",
    "threshold",
    "confidence",
    "block_size",
    "draft_tokens",
    "cache",
    "cache_block",
    "batch_size",
    "prompts",
    "tokens",
    "forwards",
    "tokens_per_forward",
    "acceptance_by_offset",
    "seconds",
    "seconds_min",
    "seconds_max",
    "tokens_per_second",
    "prefill_seconds",
    "first_token_seconds",
    "decode_tokens_per_second",
    "step_milliseconds",
    "step_width",
    "floor_milliseconds",
    "speedup_vs_hf",
    "speedup_vs_ar",
    "agrees_with_ar",
    "first_difference",
    "largest_margin",
    "accuracy",
    "peak_memory_mb",
    "repeats",
    "skipped",
)
"""Keys of a row in ``results.json``, and columns of ``results.csv``."""

SETTING_FIELDS = FIELDS[: FIELDS.index("prompts")]
"""Those that say what was measured; two runs' rows with the same values belong together."""


def table_rows(
    cells: Sequence[Cell], correct: Sequence[Check | None] | None = None, floor_seconds: float | None = None
) -> list[dict[str, Any]]:
    """Cells as the rows of ``results.json``.

    Args:
        cells: All cells; the baselines ``hf`` and ``ar`` are looked up among them at the same batch size.
        correct: One check a prompt, None where the prompt has no reference answer; None when no prompt has one.
        floor_seconds: Time to read the model's weights once.
    """
    measured = {(cell.setting.method, cell.batch_size): cell for cell in cells if cell.passes}
    rows = []
    for cell in cells:
        row = _row(cell, measured.get(("hf", cell.batch_size)), measured.get(("ar", cell.batch_size)), correct)
        # Assisted decoding reads a second model's weights, and any number of times a step.
        if cell.passes and floor_seconds is not None and cell.setting.method != "hf-assisted":
            row["floor_milliseconds"] = 1000 * floor_seconds
        rows.append(row)
    return rows


def _row(cell: Cell, hf: Cell | None, ar: Cell | None, correct: Sequence[Check | None] | None) -> dict[str, Any]:
    setting = cell.setting
    row: dict[str, Any] = dict.fromkeys(FIELDS)
    row |= {
        "method": setting.method,
        "threshold": threshold_number(setting.threshold, setting.confidence),
        "confidence": setting.confidence,
        "block_size": setting.block_size,
        "draft_tokens": setting.draft_tokens,
        "cache": setting.cache,
        "cache_block": setting.cache_block,
        "batch_size": cell.batch_size,
        "repeats": len(cell.passes),
        "skipped": cell.skipped,
    }
    if not cell.passes:
        return row
    first = cell.passes[0]
    seconds = [one.seconds for one in cell.passes]
    tokens, forwards = count_tokens(first), sum(first.forwards)
    row |= {
        "prompts": len(first.outputs),
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / forwards,
        "acceptance_by_offset": first.tokens_by_offset and [count / forwards for count in first.tokens_by_offset],
        "seconds": median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "tokens_per_second": speed(cell),
        "prefill_seconds": median(one.prefill_seconds for one in cell.passes),
        "first_token_seconds": median(one.first_token_seconds for one in cell.passes),
        "decode_tokens_per_second": _median(map(_decode_speed, cell.passes)),
        "step_milliseconds": _median(map(_step_milliseconds, cell.passes)),
        "step_width": _median(one.step_width for one in cell.passes),
        "speedup_vs_hf": speed(cell) / speed(hf) if hf else None,
        "speedup_vs_ar": speed(cell) / speed(ar) if ar else None,
        "largest_margin": cell.largest_margin,
        "accuracy": _accuracy(first.outputs, correct),
        "peak_memory_mb": max((m for one in cell.passes if (m := one.peak_memory_mb) is not None), default=None),
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
    """Completion tokens of a pass, all prompts together."""
    return sum(len(output) for output in one.outputs)


def speed(cell: Cell) -> float:
    """Completion tokens a second of wall time, prompts' reading included; median over the repeats."""
    return median(count_tokens(one) / one.seconds for one in cell.passes)


def _decode_speed(one: Pass) -> float | None:
    """Tokens a second without the calls that read prompts and without the tokens that those gave."""
    seconds, tokens = one.seconds - one.prefill_seconds, count_tokens(one) - one.prefill_tokens
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def _step_milliseconds(one: Pass) -> float | None:
    """All that a step takes, what lies between two calls of the model included."""
    return 1000 * (one.seconds - one.prefill_seconds) / one.steps if one.steps else None


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ, None if they are the same.

    >>> first_difference([5, 6, 7], [5, 6])
    2
    """
    if list(ours) == list(theirs):
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _accuracy(outputs: Sequence[Sequence[int]], correct: Sequence[Check | None] | None) -> float | None:
    if correct is None:
        return None
    marks = [check(output) for check, output in zip(correct, outputs, strict=True) if check is not None]
    return sum(marks) / len(marks) if marks else None


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as CSV text, columns in the order of ``FIELDS``; a list's values have spaces between them."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()})
    return text.getvalue()
