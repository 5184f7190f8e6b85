"""Files of results that grow while a run goes on, and what of them a broken-off run left behind.

A run writes each result as one line, in the order of the prompts, and flushes it: whatever ends the run, the file holds
whole results and at most one torn line at its end, which `resume_point` tells apart. Knows nothing of models.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from marscli.errors import InputError
from marscli.generation.api import Job
from marscli.output import to_json


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on.

    Attributes:
        done: Prompts whose results are in the file.
        size: Bytes that these take up; what follows is a torn line.
        total: Prompts in all.
    """

    done: int = 0
    size: int = 0
    total: int = 0


def resume_point(path: Path | None, jobs: Iterable[Job]) -> ResumePoint:
    """Hold the results in a file against the prompts that they should belong to.

    Args:
        path: The file; None or a missing one holds no results.
        jobs: All prompts of the run; each is looked at, so that a bad one is found before anything is decoded.

    Raises:
        InputError: The file holds something else, or results of other prompts or settings.
    """
    saved = iter(()) if path is None else _saved_results(path)
    done = size = total = 0
    for total, job in enumerate(jobs, start=1):
        line = next(saved, None)
        if line is not None:
            result, size = line
            _check_same(f"--output {path}, line {total}", result, total - 1, job)
            done = total
    if next(saved, None) is not None:
        raise InputError(
            f"--resume: {path} holds more results than there are prompts",
            hint="give the --input that it was written for",
        )
    return ResumePoint(done, size, total)


def _saved_results(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Whole lines as objects, each with the number of bytes up to its end."""
    if not path.exists():
        return
    size = 0
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.endswith(b"\n"):
                return  # torn: the run ended while it was written
            size += len(line)
            try:
                result = json.loads(line)
            except ValueError:
                result = None
            if not isinstance(result, dict):
                raise InputError(
                    f"--output {path}, line {number}: no result of mars generate",
                    hint="--resume goes on with a file that mars generate wrote; name another --output",
                )
            yield result, size


def _check_same(where: str, result: dict[str, Any], index: int, job: Job) -> None:
    expected = {"index": index, "prompt": job.prompt, "threshold": job.threshold, "verified": job.verified}
    for key, value in expected.items():
        if result.get(key) != value:
            raise InputError(
                f"--resume: {where} has {key} {_short(result.get(key))}, where this run has {_short(value)}",
                hint="resume with the model, options and --input of the run that wrote it, or name another --output",
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


class ResultFile:
    """Appends results to a file, which is made with the first of them.

    Args:
        path: The file; beyond ``size`` bytes its contents are dropped.
        size: Bytes to keep.
    """

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path = path
        self.size = size
        self.count = 0
        self._handle: IO[bytes] | None = None

    def write(self, result: object) -> None:
        """Append one result and hand it to the operating system."""
        if self._handle is None:
            self._handle = self.path.open("r+b" if self.size else "wb")
            self._handle.truncate(self.size)
            self._handle.seek(self.size)
        # Half a character, as broken text has it, becomes its JSON escape: no reason to lose a result.
        self._handle.write((to_json(result) + "\n").encode("utf-8", "backslashreplace"))
        self._handle.flush()
        self.count += 1

    def close(self) -> None:
        """Close the file; harmless if nothing was written."""
        if self._handle is not None:
            self._handle.close()
