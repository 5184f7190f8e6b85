"""The checkpoints on the way, ``checkpoint-N``: which are whole, which to go on from, and what a full disk leaves.

A checkpoint is whole once `RUN_FILE` is in it, which is written last.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from marscli.errors import InputError, MarsError
from marscli.training import launch
from marscli.training.config import TrainConfig

logger = logging.getLogger(__name__)

RUN_FILE = "mars_run.json"
LOG_FILE = "train_log.jsonl"
NEEDED = ("trainer_state.json", RUN_FILE)
NEEDED_UNSHARDED = ("optimizer.pt", "scheduler.pt")  # without them the library resumes, silently, from zero moments
DISK_FULL = ("No space left", "quota exceeded", "inline_container")  # the last is torch.save's


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to go on from."""

    folder: Path
    step: int


def find_checkpoint(config: TrainConfig, folder: Path, course: Mapping[str, Any]) -> Resumed | None:
    """The checkpoint that ``--resume`` or ``--resume-from`` means; None to begin at the beginning.

    Args:
        config: The run.
        folder: Its output folder.
        course: What the run that made the checkpoint must agree with.

    Raises:
        InputError: The checkpoint named is not whole, or is of another run.
    """
    if config.resume_from is not None:
        path = Path(config.resume_from)
        missing = _missing(path)
        if missing:
            raise InputError(
                f"--resume-from {path}: no whole checkpoint ({missing[0]} is missing)",
                hint=f"name a folder checkpoint-N; in {path.parent}: {', '.join(_whole(path.parent)) or 'none'}",
            )
        chosen = Resumed(path, _step(path))
    elif config.resume:
        whole = _whole(folder)
        if not whole:
            logger.warning(f"--resume: no complete checkpoint in {folder}; training starts from the beginning")
            return None
        path = folder / whole[-1]
        chosen = Resumed(path, _step(path))
    else:
        return None
    before = json.loads((chosen.folder / RUN_FILE).read_text(encoding="utf-8"))
    defaults = {field.name: field.default for field in fields(TrainConfig) if field.default is not MISSING}
    for name, value in course.items():
        if before.get(name, defaults.get(name)) != value:
            raise InputError(
                f"--resume: {chosen.folder} was made with {name.replace('_', '-')} {before.get(name)}, not {value}",
                hint="give the options of the first run again, or start a new run in another folder",
            )
    logger.info(f"resuming from {chosen.folder}")
    return chosen


def remove_broken(folder: Path) -> None:
    """Take away what was broken off while it was written: the library would count it as a checkpoint."""
    for path in folder.glob("checkpoint-*"):
        if _missing(path):
            logger.warning(f"{path} is not complete and is removed")
            shutil.rmtree(path)


def remove_all(folder: Path) -> None:
    """Take away the checkpoints of a finished run."""
    for name in _whole(folder):
        shutil.rmtree(folder / name)


@contextmanager
def nothing_without_a_checkpoint(folder: Path) -> Iterator[None]:
    """Where a run fails before its first checkpoint, take its log away: nothing could go on from it."""
    try:
        yield
    except BaseException:
        if launch.rank() == 0 and not any(folder.glob("checkpoint-*")) and not (folder / "config.json").exists():
            (folder / LOG_FILE).unlink(missing_ok=True)
        raise


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Say in one way that the disk is full: every library that writes has an exception of its own for it."""
    try:
        yield
    except (MarsError, KeyboardInterrupt):
        raise
    except Exception as error:
        text = str(error)
        if not any(sign in text for sign in DISK_FULL):
            raise
        for path in folder.glob("checkpoint-*"):
            if not (path / RUN_FILE).exists():
                shutil.rmtree(path)
        raise MarsError(
            f"the disk of {folder} is full: {text.splitlines()[0]}",
            hint="make room, then give the same command with --resume; checkpoints that were complete still are",
        ) from error


def _whole(folder: Path) -> list[str]:
    """Names of the whole checkpoints in a folder, the newest last."""
    return [path.name for path in sorted(folder.glob("checkpoint-*"), key=_step) if not _missing(path)]


def _missing(path: Path) -> list[str]:
    needed = NEEDED if launch.is_sharded() else (*NEEDED, *NEEDED_UNSHARDED)
    return [name for name in needed if not (path / name).is_file()]


def _step(path: Path) -> int:
    try:
        return int(json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError):
        return -1
