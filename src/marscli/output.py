"""Files that commands write: prepared before any work, complete or absent afterwards.

How to use it (no heavy imports here, safe anywhere):

    with prepared_output_dir(cfg.output_dir, ["results.json", "report.md"], force=cfg.force) as folder:
        ...                                  # check the rest of the input, load the model, work
        write_json(folder / "results.json", results)

    with prepared_output_file(cfg.output, force=cfg.force) as path:      # one file named by the user
        write_jsonl(path, rows)

Entering the block creates the folder, tests that it can be written to and refuses (``InputError``) where one of the
named files exists already. Names may be glob patterns (``checkpoint-*``, ``samples_*.jsonl``). Leaving the block by an
exception removes the folders that entering it made, as long as nothing was put into them.

``atomic_write`` is under every writer: temporary name beside the target, fsync, ``os.replace``; a failed write leaves
the old file, or none. This module ignores what the files mean: their formats belong to the commands.
"""

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from marscli.errors import InputError


@contextmanager
def prepared_output_dir(
    path: str | Path,
    files: Iterable[str] = (),
    *,
    force: bool = False,
    resume: bool = False,
    option: str = "--output-dir",
    hint: str = "choose another folder, or add --force to replace them",
) -> Iterator[Path]:
    """Create a folder for results, test it, and clean up behind a refused run.

    Args:
        path: The folder; missing parents are created too.
        files: Names or glob patterns, relative to the folder, of what the command will write there.
        force: Existing files may be replaced.
        resume: Existing files belong to the run that is continued.
        option: The option to name in errors.
        hint: What to do where one of the files exists.

    Yields:
        The folder.

    Raises:
        InputError: The folder cannot be made or written to, or one of the files exists already.
    """
    folder = Path(path).expanduser()
    made = _make_folder(folder, option)
    try:
        if not (force or resume):
            _refuse_existing(folder, files, option, hint)
        yield folder
    except BaseException:
        for directory in reversed(made):
            with suppress(OSError):  # not empty: something worth keeping was written
                directory.rmdir()
        raise


@contextmanager
def prepared_output_file(
    path: str | Path, *, force: bool = False, resume: bool = False, option: str = "--output"
) -> Iterator[Path]:
    """Do for one file, named by the user, what `prepared_output_dir` does for a folder; yields the path."""
    target = Path(path).expanduser()
    if target.is_dir():
        raise InputError(f"{option} {path}: this is a folder", hint=f"name a file, such as {target / 'results.jsonl'}")
    with prepared_output_dir(target.parent, option=option):
        if target.exists() and not (force or resume):
            raise InputError(f"{option} {path}: the file exists already", hint="add --force to replace it")
        yield target


def _make_folder(folder: Path, option: str) -> list[Path]:
    """Create `folder` and what is missing above it, test it for writing; return what was made, outermost first."""
    made: list[Path] = []
    try:
        missing = [directory for directory in (folder, *folder.parents) if not directory.exists()]
        for directory in reversed(missing):
            directory.mkdir()
            made.append(directory)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".mars-write-test-"):
            pass
    except OSError as error:
        for directory in reversed(made):
            with suppress(OSError):
                directory.rmdir()
        raise InputError(
            f"{option} {folder}: cannot write there ({error.strerror or error})",
            hint="choose a folder that you may write to, or change its permissions",
        ) from error
    return made


def _refuse_existing(folder: Path, files: Iterable[str], option: str, hint: str) -> None:
    found = sorted({match.name for pattern in files for match in folder.glob(pattern)})
    if found:
        shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise InputError(
            f"{option} {folder}: the folder holds results already ({shown})",
            hint=hint,
        )


@contextmanager
def atomic_write(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file that becomes `path` when the block ends well; otherwise it vanishes.

    Args:
        path: The file to write; its folder must exist.
        mode: ``"w"`` for UTF-8 text, ``"wb"`` for bytes.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Half a character, as broken text has it, becomes its JSON escape: no reason to lose a result.
        text = {} if "b" in mode else {"encoding": "utf-8", "errors": "backslashreplace"}
        with temporary.open(mode, **text) as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Serialise strictly: dataclasses become objects, paths and dtypes strings, NaN and infinities null."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as handle:
        handle.write(text)


def write_json(path: str | Path, value: Any) -> None:
    """Write one indented JSON document atomically."""
    write_text(path, to_json(value, indent=2) + "\n")


def write_jsonl(path: str | Path, rows: Iterable[Any]) -> None:
    """Write one JSON object a line, atomically as a whole."""
    with atomic_write(path) as handle:
        for row in rows:
            handle.write(to_json(row) + "\n")


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Lay out a table that reads well in a terminal and in Markdown; numbers are aligned to the right.

    Floats are shown with two decimals, ``None`` as ``–``; format a cell beforehand to show it otherwise.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    raw = [list(row) for row in cells]
    widths = [max([len(str(column)), 3, *(len(row[i]) for row in raw)]) for i, column in enumerate(columns)]
    numeric = [bool(raw) and all(_is_number(row[i]) for row in raw) for i in range(len(columns))]

    def line(values: Sequence[str]) -> str:
        padded = [v.rjust(w) if right else v.ljust(w) for v, w, right in zip(values, widths, numeric, strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * (w - 1) + (":" if right else "-") for w, right in zip(widths, numeric, strict=True)]
    return "\n".join([line([str(c) for c in columns]), line(rule), *(line(row) for row in raw)])


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.2f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _is_number(text: str) -> bool:
    return text == "–" or text.rstrip("×%").lstrip("-+").replace(".", "", 1).isdigit()
