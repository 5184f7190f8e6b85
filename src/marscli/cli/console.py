"""What goes to the terminal beside the result: notes, warnings, progress, errors, all on stderr.

How to use it in a command:

    configure(quiet=quiet, no_progress=no_progress, debug=debug)    # first line of every command
    echo(text)                                # the result, and nothing else: stdout
    note("saved to runs/a")                   # stderr, silent with --quiet
    warn("only 16 of 100 rows were used")     # stderr, `warning: …`
    with progress("evaluating", total=100) as advance:              # a bar on a terminal only
        library_call(..., progress=advance)   # advance(n=1) per finished item

Libraries never import this module. They report through ``logging.getLogger(__name__)``: `configure` sends the
``marscli`` loggers here (info as notes, warnings as ``warning: …``) and keeps other libraries' chatter off stderr.
"""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marscli.errors import MarsError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@dataclass
class Settings:
    """How talkative this process is."""

    quiet: bool = False
    no_progress: bool = False
    debug: bool = False


settings = Settings()
_bars: list["Console"] = []  # of the bars on screen, the innermost last: what is said meanwhile goes above it


class _Handler(logging.Handler):
    """Shows records of the ``marscli`` loggers on whatever ``sys.stderr`` is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            warn(record.getMessage())
        else:
            note(record.getMessage())


def configure(*, quiet: bool = False, no_progress: bool = False, debug: bool = False) -> None:
    """Set how talkative this process is; every command calls it before anything else."""
    settings.quiet, settings.no_progress, settings.debug = quiet, no_progress, debug
    logger = logging.getLogger("marscli")
    logger.handlers = [_Handler()]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    if not debug:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        for category in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
    if not shows_progress():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
        if "transformers" in sys.modules:  # it reads the environment only when it is imported
            sys.modules["transformers"].utils.logging.disable_progress_bar()


def restore() -> None:
    """Undo what `configure` did to logging, for programs and tests that go on after a command."""
    logger = logging.getLogger("marscli")
    logger.handlers, logger.propagate = [], True
    settings.quiet = settings.no_progress = settings.debug = False


def shows_progress() -> bool:
    """Whether bars are welcome: a terminal, and neither --quiet nor --no-progress."""
    return sys.stderr.isatty() and not (settings.quiet or settings.no_progress)


def echo(text: str, *, end: str = "\n") -> None:
    """Write a part of the result to stdout, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def show(result: "RenderableType") -> None:
    """Write a result that rich lays out to stdout; in colour on a terminal only."""
    from rich.console import Console

    Console(highlight=False).print(result, soft_wrap=True)


def note(message: str) -> None:
    """Say something useful on stderr; --quiet silences it."""
    if not settings.quiet:
        _stderr(message, "dim")


def warn(message: str) -> None:
    """Say something on stderr that the user should know."""
    _stderr(message, "", label="warning", label_style="bold yellow")


def show_error(message: str, hint: str) -> None:
    """Print the one ``error:`` message of a failed run and its ``hint:`` line."""
    _stderr(message, "", label="error", label_style="bold red")
    _stderr(hint, "", label="hint", label_style="bold cyan")


def show_exception(error: BaseException, *, debug: bool = False) -> int:
    """Report the exception that ended a run and return the exit code; the traceback only with --debug."""
    if debug or settings.debug:
        sys.stderr.write("".join(traceback.format_exception(error)))
    if isinstance(error, MarsError):
        show_error(error.message, error.hint)
        return error.exit_code
    text = " ".join(str(error).split()) or "no message"
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        show_error(f"out of memory: {text}", "use a smaller --batch-size, --max-length or --dtype bfloat16")
    elif isinstance(error, OSError):
        show_error(text, "check that the path is right, that you may use it, and that the disk is not full")
    else:
        show_error(f"{type(error).__name__}: {text}", "this may be a bug; --debug shows the traceback to report")
    return 1


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr while the block runs; where bars are unwelcome the yielded function does nothing.

    Yields:
        ``advance(n=1, status="")``: call it when n more items are done; a status stays until the next one.
    """
    if not shows_progress():
        yield lambda n=1, status="": None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    # Redirection would swallow the result that a command streams to stdout meanwhile.
    bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
    with bar:
        task = bar.add_task(description, total=total, status="")

        def advance(n: int = 1, status: str = "") -> None:
            bar.update(task, advance=n, **({"status": status} if status else {}))

        _bars.append(bar.console)
        try:
            yield advance
        finally:
            _bars.pop()


def _stderr(message: str, style: str, *, label: str = "", label_style: str = "") -> None:
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
        sys.stderr.write((f"{label}: {message}" if label else message) + "\n")
        sys.stderr.flush()
        return
    from rich.console import Console
    from rich.text import Text

    text = Text.assemble((f"{label}: ", label_style), message) if label else Text(message, style=style)
    (_bars[-1] if _bars else Console(stderr=True)).print(text, soft_wrap=True, highlight=False)
