"""What one ``mars bench`` run is asked to do. Imports no torch: wrong input is found before that."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from marscli.core.params import CONFIDENCES, check_seed, parse_threshold
from marscli.errors import InputError

METHODS = ("hf", "ar", "threshold")
"""Names of the methods, in the order in which they are measured and shown; ``methods.METHODS`` holds what they do."""

SWEPT = ("threshold",)
"""Those that are measured at each of ``thresholds``."""


@dataclass(frozen=True)
class BenchConfig:
    """Options of ``mars bench``, named as on the command line.

    Args:
        model: Hub id or folder.
        output_dir: Folder for the result files; None (Python only) writes none.
        dataset: JSONL file with ``prompt``, ``messages`` or ``question`` rows; None takes the built-in prompts.
        methods: What to compare, of ``METHODS``.
        thresholds: τ values of the methods that take one; ``"exact"`` or a number. Held parsed: None is exact.
        batch_sizes: Rows decoded together; every method is measured at each.
        limit: Only the first so many prompts.
        repeats: Timed passes of each row of the table.
        max_new_tokens: Most new tokens of a prompt.
        prompt_tokens: Cut or repeat every prompt to this many tokens (synthetic lengths).
        confidence: What τ is compared with.
        block_size: B of the multi-token methods; None takes the checkpoint's.

    Raises:
        InputError: An option is out of its range; names the flag.
    """

    model: str
    output_dir: Path | None = None
    dataset: Path | None = None
    methods: tuple[str, ...] = METHODS
    thresholds: tuple[float | None, ...] = field(default=("exact", 0.95))  # type: ignore[assignment]
    batch_sizes: tuple[int, ...] = (1, 4)
    limit: int = 16
    repeats: int = 3
    max_new_tokens: int = 128
    prompt_tokens: int | None = None
    confidence: str = "probability"
    block_size: int | None = None
    tokenizer: str | None = None
    chat_template: bool | None = None
    system: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    trust_remote_code: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if self.confidence not in CONFIDENCES:
            raise InputError(
                f"--confidence: {self.confidence!r} is not a confidence measure",
                hint=f"one of {', '.join(CONFIDENCES)}",
            )
        methods = _distinct(str(name).strip() for name in _listed(self.methods))
        for name in methods:
            if name not in METHODS:
                near = difflib.get_close_matches(name, METHODS, n=1)
                hint = (f"did you mean {near[0]}? " if near else "") + f"methods: {', '.join(METHODS)}"
                raise InputError(f"--methods: there is no method {name!r}", hint=hint)
        if not methods:
            raise InputError("--methods: the list is empty", hint=f"methods: {', '.join(METHODS)}")
        # The table and the files keep one order, whatever the order in which the methods were typed.
        methods = tuple(name for name in METHODS if name in methods)
        thresholds = _distinct(_threshold(tau, self.confidence) for tau in _listed(self.thresholds))
        if not thresholds and "threshold" in methods:
            raise InputError("--thresholds: the list is empty", hint="for example --thresholds exact,0.95")
        batch_sizes = tuple(sorted(set(_integers("--batch-sizes", self.batch_sizes))))
        if not batch_sizes:
            raise InputError("--batch-sizes: the list is empty", hint="for example --batch-sizes 1,4")
        for flag, value, least in (
            ("--batch-sizes", batch_sizes[0], 1),
            ("--limit", self.limit, 1),
            ("--repeats", self.repeats, 1),
            ("--max-new-tokens", self.max_new_tokens, 1),
            ("--prompt-tokens", self.prompt_tokens, 1),
            ("--block-size", self.block_size, 1),
        ):
            if value is not None and value < least:
                raise InputError(f"{flag}: {value} is too small", hint=f"give a whole number of at least {least}")
        check_seed(self.seed)
        if self.block_size == 1 and "threshold" in methods:
            raise InputError(
                "--block-size: 1 leaves the method threshold nothing to predict ahead",
                hint="give 2 or more, or leave threshold out of --methods (ar is decoding at block size 1)",
            )
        set_ = object.__setattr__
        set_(self, "methods", methods)
        set_(self, "thresholds", thresholds)
        set_(self, "batch_sizes", batch_sizes)
        set_(self, "model", str(self.model))
        for name in ("output_dir", "dataset"):
            value = getattr(self, name)
            set_(self, name, None if value is None else Path(value))

    @property
    def passes(self) -> int:
        """Passes over the prompts in all, warm-ups included: the length of a progress bar."""
        lines = sum(len(self.thresholds) if name in SWEPT else 1 for name in self.methods)
        return lines * len(self.batch_sizes) * (self.repeats + 1)

    def resolved(self) -> dict[str, Any]:
        """The options as plain JSON values, for ``meta``; an exact threshold reads ``"exact"``."""
        options = asdict(self)
        options["thresholds"] = ["exact" if tau is None else tau for tau in self.thresholds]
        return {
            key: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            for key, value in options.items()
        }


def _threshold(value: Any, confidence: Any) -> float | None:
    try:
        return parse_threshold(value, confidence)
    except InputError as error:
        raise InputError(error.message.replace("--threshold ", "--thresholds: "), hint=error.hint) from None


def _listed(value: Any) -> Iterable[Any]:
    """A list option given from Python as one value or as ``"a,b"`` is a list too."""
    if isinstance(value, str):
        return [part for part in value.split(",") if part.strip()]
    return value if isinstance(value, Iterable) else [value]


def _integers(flag: str, values: Any) -> list[int]:
    numbers = []
    for value in _listed(values):
        try:
            numbers.append(int(str(value)))
        except ValueError:
            raise InputError(f"{flag}: {value!r} is not a whole number", hint=f"for example {flag} 1,4") from None
    return numbers


def _distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
