"""What one ``mars eval`` run is asked to do. Imports no torch: wrong input is found before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from marscli.core.params import CONFIDENCES, Confidence, check_seed, parse_threshold
from marscli.errors import InputError


@dataclass(frozen=True)
class EvalConfig:
    """Options of ``mars eval``, named as on the command line.

    Args:
        model: Hub id or folder.
        tasks: Names of lm-eval tasks, groups or tags; ``*`` and ``?`` are wildcards; ``paper`` is the paper's six.
        output_dir: Folder for the result files; None (Python only) writes none.
        threshold: τ values, each evaluated in the same run; ``"exact"`` or numbers. Held parsed: None is exact.
        confidence: What τ is compared with.
        verify: Let the next forward verify what τ did not pass; False is the paper's scheme.
        draft_tokens: Masks a group and drafts verified a step; None lets the engine choose in exact mode, and is B − 1
            below it.
        block_size: B; None takes the checkpoint's.
        max_new_tokens: Most new tokens of an answer; None leaves it to each task (256 where a task does not say).
        batch_size: Rows decoded together, in each process.
        num_fewshot: Worked examples before each question; None leaves it to each task.
        limit: Only the first so many problems of each task.
        chat_template: Wrap prompts in the chat template; None does so where the tokenizer has one.
        system: System message.
        log_samples: Write every question, answer and its cost to ``samples_TASK_THRESHOLD.jsonl``.
        include_path: Folders with further lm-eval task files (YAML).
        data_root: Folder that holds data set ``org/name`` as ``org/name``; what is not in there comes from the Hub.
        confirm_run_unsafe_code: Consent to tasks that run the code which the model writes.
        tokenizer: Hub id or folder; None takes the model's.
        device: auto, cpu, cuda[:N] or mps.
        dtype: auto (the checkpoint's), float32, bfloat16 or float16.
        compile: Compile the model's calls with torch.compile when it generates.
        seed: Seed of everything random; 0 gives lm-eval's own default seeds.
        num_processes: Processes that answer together, each with a copy of the model; one a device.
        paper_reference: Show the figures that the paper published beside these.
        trust_remote_code: Run Python code that comes with a checkpoint.
        resume: Go on with the run of the same settings in the output folder.
        force: Replace result files that exist already.

    Raises:
        InputError: An option is out of its range; names the flag.
    """

    model: str
    tasks: Any
    output_dir: Any = None
    threshold: Any = ("exact",)
    confidence: Confidence = "probability"
    verify: bool = True
    draft_tokens: int | None = None
    block_size: int | None = None
    max_new_tokens: int | None = None
    batch_size: int | str = 8
    num_fewshot: int | None = None
    limit: int | None = None
    chat_template: bool | None = None
    system: str | None = None
    log_samples: bool = False
    include_path: Any = ()
    data_root: Any = None
    confirm_run_unsafe_code: bool = False
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    compile: bool = False
    seed: int = 0
    num_processes: int = 1
    paper_reference: bool = False
    trust_remote_code: bool = False
    resume: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if self.confidence not in CONFIDENCES:
            raise InputError(
                f"--confidence {self.confidence!r} is unknown", hint=f"use one of {', '.join(CONFIDENCES)}"
            )
        if self.draft_tokens is not None and not self.verify:
            raise InputError("--draft-tokens: without --verify there are no drafts", hint="drop one of the two")
        if self.resume and self.force:
            raise InputError("--resume keeps results and --force replaces them", hint="drop one of the two")
        if self.resume and self.output_dir is None:
            raise InputError("--resume goes on with results in --output-dir, which is missing", hint="name the folder")
        tasks = tuple(dict.fromkeys(_split(self.tasks)))
        if not tasks:
            raise InputError("--tasks names no task", hint="for example --tasks gsm8k; --list-tasks shows all names")
        check_seed(self.seed)
        thresholds = tuple(dict.fromkeys(parse_threshold(value, self.confidence) for value in _split(self.threshold)))
        if not thresholds:
            raise InputError("--threshold: the list is empty", hint="for example --threshold exact,0.95")
        batch_size = _batch_size(self.batch_size)
        for flag, value, least in (
            ("--block-size", self.block_size, 1),
            ("--draft-tokens", self.draft_tokens, 0),
            ("--max-new-tokens", self.max_new_tokens, 1),
            ("--batch-size", batch_size, 1),
            ("--num-processes", self.num_processes, 1),
            ("--num-fewshot", self.num_fewshot, 0),
            ("--limit", self.limit, 1),
        ):
            if value is not None and value < least:
                raise InputError(f"{flag} {value} is too small", hint=f"give a whole number of at least {least}")
        include_path = task_folders(_split(self.include_path or ()))
        data_root = None if self.data_root is None else Path(self.data_root).expanduser().resolve()
        if data_root is not None and not data_root.is_dir():
            raise InputError(
                f"--data-root {data_root}: no such folder",
                hint="name the folder that holds data set openai/gsm8k as openai/gsm8k",
            )
        normalised: dict[str, Any] = {
            "model": str(self.model),
            "tasks": tasks,
            "batch_size": batch_size,
            "threshold": thresholds,
            "include_path": include_path,
            "data_root": data_root,
            "output_dir": None if self.output_dir is None else Path(self.output_dir),
        }
        for name, value in normalised.items():
            object.__setattr__(self, name, value)

    def resolved(self) -> dict[str, Any]:
        """The options as plain JSON values, for ``meta``; an exact threshold reads ``"exact"``."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        options["threshold"] = [threshold_label(tau) for tau in self.threshold]
        return {
            name: [str(item) for item in value]
            if isinstance(value, tuple)
            else str(value)
            if isinstance(value, Path)
            else value
            for name, value in options.items()
        }


def _batch_size(value: int | str) -> int:
    """``--batch-size`` as a number.

    Raises:
        InputError: ``auto``, as lm-eval knows it, or no number.
    """
    try:
        return int(value)
    except ValueError:
        auto = str(value).startswith("auto")
        raise InputError(
            f"--batch-size {value}: " + ("an automatic batch size is not supported" if auto else "not a whole number"),
            hint="give a number; start with 8, and double it while memory and tokens per second allow",
        ) from None


def task_folders(names: Iterable[str | Path]) -> tuple[Path, ...]:
    """The folders of ``--include-path``.

    Raises:
        InputError: One of them is not there.
    """
    folders = tuple(Path(name).expanduser().resolve() for name in names)
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"--include-path {folder}: no such folder", hint="name a folder with task files (*.yaml)")
    return folders


def threshold_label(threshold: float | None) -> str:
    """τ as tables, plots and file names show it: ``exact`` or the number."""
    return "exact" if threshold is None else f"{threshold:g}"


def _split(value: Any) -> list[Any]:
    """A list option given from Python as one value or as ``"a,b"`` is a list too."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [part for item in value for part in _split(item)] if isinstance(value, Iterable) else [value]
