"""Two benches side by side: what changed, and whether a speed-up fell. Reads result files; needs no model and no torch.

Ratios are compared and not times: each is taken within one run, so that a machine that is slower today does not pass
for a slower program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marscli.benchmarking.results import SETTING_FIELDS, label
from marscli.errors import InputError
from marscli.output import markdown_table

RATIOS = ("speedup_vs_hf", "speedup_vs_ar")
SHOWN = ("tokens_per_forward", *RATIOS, "agrees_with_ar", "accuracy")
MACHINE = ("model", "device", "device_name", "dtype", "threads", "data")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """A row of both runs, or of one of them."""

    before: Row | None
    after: Row | None

    @property
    def row(self) -> Row:
        """The one that there is."""
        row = self.after or self.before
        assert row is not None
        return row

    @property
    def name(self) -> str:
        """``threshold τ=0.95, batch 4``."""
        return f"{label(self.row)}, batch {self.row['batch_size']}"

    def fell(self, tolerance: float) -> list[str]:
        """What got worse by more than the tolerance, in words."""
        if self.before is None or self.after is None or self.before["skipped"]:
            return []
        if self.after["skipped"]:
            return [f"{self.name}: ran before, now skipped: {self.after['skipped']}"]
        found = []
        for key in RATIOS:
            old, new = self.before.get(key), self.after.get(key)
            if old and new is not None and new < old * (1 - tolerance):
                found.append(f"{self.name}: {key} fell from {old:.2f} to {new:.2f} ({new / old - 1:+.0%})")
        return found


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        changes: A row each, in the order of the second run; those of the first alone follow.
        regressions: Ratios that fell by more than the tolerance, and rows that no longer run.
        notes: What else differs between the runs: model, machine, options.
    """

    changes: list[Change]
    regressions: list[str]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        rows = [
            {
                **{name: change.row.get(name) for name in SETTING_FIELDS},
                **{name: {"before": _of(change.before, name), "after": _of(change.after, name)} for name in SHOWN},
            }
            for change in self.changes
        ]
        return {"rows": rows, "regressions": self.regressions, "notes": self.notes}

    def table(self) -> str:
        """For the terminal and for pasting."""
        shown = [name for name in SHOWN if any(_of(c.before, name) or _of(c.after, name) for c in self.changes)]
        titles = {"tokens_per_forward": "tokens/forward", "speedup_vs_hf": "vs hf", "speedup_vs_ar": "vs ar"}
        columns = ["batch", "method", *(titles.get(name, name.replace("_", " ")) for name in shown), "note"]
        lines = []
        for change in self.changes:
            cells = [_pair(_of(change.before, name), _of(change.after, name), name in RATIOS) for name in shown]
            lines.append([str(change.row["batch_size"]), label(change.row), *cells, _note(change)])
        return markdown_table(columns, lines)


def compare(before: str | Path, after: str | Path, *, tolerance: float = 0.1) -> Comparison:
    """Compare two result files.

    Args:
        before: ``results.json`` of a bench, or the folder that holds it.
        after: Likewise, of a later one.
        tolerance: The share by which a ratio may fall.

    Raises:
        InputError: A file cannot be read or is no bench's, no row is in both, or the tolerance is no share.
    """
    if not 0 <= tolerance < 1:
        raise InputError(f"--tolerance: {tolerance} is not a share from 0 to 1", hint="0.1 lets a ratio fall by 10%")
    old, new = _read(before), _read(after)
    old_rows, new_rows = ({_key(row): row for row in document["rows"]} for document in (old, new))
    if not old_rows.keys() & new_rows.keys():
        raise InputError(
            f"--compare: no row of {before} is in {after} too",
            hint="rows belong together that have the same method, threshold, confidence, block size, drafts, cache and "
            "batch size",
        )
    changes = [Change(old_rows.get(key), row) for key, row in new_rows.items()]
    changes += [Change(row, None) for key, row in old_rows.items() if key not in new_rows]
    regressions = [text for change in changes for text in change.fell(tolerance)]
    return Comparison(changes, regressions, _notes(old["meta"], new["meta"]))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in SETTING_FIELDS)


def _read(path: str | Path) -> dict[str, Any]:
    file = Path(path) / "results.json" if Path(path).is_dir() else Path(path)
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        rows = document["rows"]
        if not all({"method", "batch_size", "skipped", "threshold", "confidence"} <= row.keys() for row in rows):
            raise KeyError("method")
        return {"rows": rows, "meta": document["meta"]}
    except OSError as error:
        raise InputError(
            f"--compare {file}: cannot be read ({error.strerror})", hint="give two results.json of mars bench"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"--compare {file}: not a result file of mars bench", hint="give two results.json of mars bench"
        ) from None


def _notes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    pairs = [(name, before.get(name), after.get(name)) for name in MACHINE]
    for part in ("options", "versions"):
        old, new = before.get(part, {}), after.get(part, {})
        names = [name for name in new if name not in ("output_dir", "force", "resume", "model", "quick", "suite")]
        pairs += [(name, old[name], new[name]) for name in names if name in old]
    pairs.append(("interrupted", before.get("interrupted"), after.get("interrupted")))
    notes = {name: f"{name}: {_text(old)} → {_text(new)}" for name, old, new in pairs if old != new}
    return list(notes.values())


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def _of(row: Row | None, name: str) -> Any:
    return None if row is None else row.get(name)


def _pair(old: float | None, new: float | None, is_ratio: bool) -> str:
    text = f"{_number(old)} → {_number(new)}" if _number(old) != _number(new) else _number(new)
    if is_ratio and old and new and _number(old) != _number(new):
        text += f" ({new / old - 1:+.0%})"
    return text


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _note(change: Change) -> str:
    if change.before is None:
        return "new"
    if change.after is None:
        return "gone"
    return f"skipped: {change.after['skipped']}" if change.after["skipped"] else ""
