"""Every timed pass on disk as soon as it is made, so that a broken-off bench can go on: ``passes.jsonl``.

The first line says what is measured and where; each further one is a pass. A line that was being written when the
process died is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from marscli.benchmarking.config import BenchConfig
from marscli.benchmarking.results import Cell, Pass
from marscli.errors import InputError
from marscli.output import to_json, write_text

FILE = "passes.jsonl"
_FREE = ("output_dir", "force", "resume", "quick", "suite")  # may differ: the settings that these two stand for may not


def identity(config: BenchConfig, prompts: Sequence[Sequence[int]], machine: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for two passes to stand in one table: options, prompts' token ids, machine."""
    options = {name: value for name, value in config.resolved().items() if name not in _FREE}
    digest = hashlib.sha256(json.dumps([list(ids) for ids in prompts]).encode()).hexdigest()
    return {**options, "prompts": digest[:16], **machine}


class PassLog:
    """The file, open for one more run.

    Args:
        folder: Where results go.
        identity: Of this run.
        cells: The rows of the table; with ``resume`` they get the passes that the file holds.
        resume: Go on with what is there.

    Raises:
        InputError: What is there was measured otherwise; names what differs.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], cells: Sequence[Cell], *, resume: bool) -> None:
        self._path = folder / FILE
        self._unwritten: list[str] | None = [to_json({"identity": identity})]
        if resume and not self._path.is_file() and (folder / "results.json").exists():
            raise InputError(
                f"--resume: {folder} holds results, but no {FILE} to go on from",
                hint="choose another folder, or use --force instead to replace them",
            )
        if resume and self._path.is_file():
            header, *saved = _complete_lines(self._path)
            _refuse_differences(header.get("identity", {}), json.loads(self._unwritten[0])["identity"], folder)
            by_key = {to_json(_key(cell)): cell for cell in cells}
            for line in saved:
                cell = by_key.get(to_json(line["row"]))
                if cell is not None and cell.skipped is None:
                    cell.passes.append(Pass(**line["pass"]))
                    self._unwritten.append(to_json(line))

    def add(self, cell: Cell, one: Pass) -> None:
        """Append a pass; the file is made with the first one, so that a refused run leaves none."""
        if self._unwritten is not None:
            write_text(self._path, "".join(f"{line}\n" for line in self._unwritten))
            self._unwritten = None
        with self._path.open("a", encoding="utf-8") as handle:
            handle.write(to_json({"row": _key(cell), "pass": one}) + "\n")


def _key(cell: Cell) -> dict[str, Any]:
    return {**asdict(cell.setting), "batch_size": cell.batch_size}


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines or [{}]


def _refuse_differences(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    names = [name for name in now if before.get(name) != now[name]]
    if names:
        told = "; ".join(f"{name} was {_short(before.get(name))}, is {_short(now[name])}" for name in names)
        raise InputError(
            f"--resume: the run in {folder} had other settings: {told}",
            hint="repeat its command with --resume (results.json holds it), or start anew in another folder",
        )


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
