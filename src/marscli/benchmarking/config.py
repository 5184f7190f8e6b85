"""What one ``mars bench`` run is asked to do. Imports no torch: wrong input is found before that."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from marscli.core.params import CONFIDENCES, Confidence, check_seed, parse_threshold
from marscli.errors import InputError

METHODS = ("hf", "hf-lookup", "hf-assisted", "ar", "threshold", "verified", "block-cache", "no-cache", "jacobi")
"""Names of the methods, in the order in which they are measured and shown."""

SWEPT = ("threshold", "verified", "block-cache", "no-cache")
"""Those that are measured at each τ."""

DEFAULTS: dict[str, Any] = {
    "methods": ("hf", "ar", "threshold", "verified"),
    "thresholds": ("exact", 0.95),
    "confidence": ("probability",),
    "cache_blocks": (32,),
    "batch_sizes": (1, 4),
    "limit": 16,
    "repeats": 3,
    "max_new_tokens": 128,
}
QUICK: dict[str, Any] = {"limit": 4, "repeats": 2, "max_new_tokens": 48}

SUITES: dict[str, dict[str, Any]] = {
    "paper": {
        "dataset": "openai/gsm8k:main:test",
        "methods": ("hf", "ar", "threshold", "verified", "block-cache", "no-cache"),
        "thresholds": ("exact", 0.95, 0.9, 0.8, 0.7, 0.6, 0.5),
        "cache_blocks": (8, 16, 32, 64),
        "batch_sizes": (1, 4, 8, 16),
        "limit": 32,
        "max_new_tokens": 256,
    }
}
"""``paper``: tables 5 and 8 and figure 3 of arXiv 2604.07023; ``plan.in_suite`` leaves out what they do not show."""

LISTS = ("methods", "thresholds", "confidence", "cache_blocks", "batch_sizes")


@dataclass(frozen=True)
class BenchConfig:
    """Options of ``mars bench``, named as on the command line.

    Args:
        model: Hub id or folder.
        output_dir: Folder for the result files; None (Python only) writes none.
        dataset: File or Hub id (``org/name[:config[:split]]``) with ``prompt``, ``messages``, ``question`` or
            ``instruction`` rows; None takes the built-in prompts.
        methods: What to compare, of ``METHODS``.
        thresholds: τ values of the methods that take one: ``"exact"``, a number, or ``"entropy:0.3"`` for one of
            several measures.
        confidence: What τ is compared with; several give a row each.
        draft_tokens: Masks a group and drafts a step of ``verified``, guesses a step of ``jacobi``; None leaves it to
            the engine in exact mode and is B − 1 below.
        cache_blocks: Block sizes of ``block-cache``.
        batch_sizes: Rows decoded together; every method is measured at each.
        limit: Only the first so many prompts.
        repeats: Timed passes of each row of the table.
        max_new_tokens: Most new tokens of a prompt.
        prompt_tokens: Cut or repeat every prompt to this many tokens (synthetic lengths).
        block_size: B of the multi-token methods; None takes the checkpoint's.
        draft: Hub id or folder of the small model of ``hf-assisted``.
        compile: Compile the model's calls in marscli's engine (not in transformers' ``generate``).
        suite: ``paper``: other defaults, and only the combinations that its tables show.
        quick: Smaller defaults.
        resume: Go on with the run in ``output_dir``.

    A list may be given as one value or as ``"a,b"``. None takes the value of ``quick``, else the suite's, else the
    default.

    Raises:
        InputError: An option is out of its range; names the flag.
    """

    model: str
    output_dir: Path | None = None
    dataset: str | None = None
    methods: tuple[str, ...] | None = None
    thresholds: tuple[str | float, ...] | None = None
    confidence: tuple[str, ...] | None = None
    draft_tokens: int | None = None
    cache_blocks: tuple[int, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    limit: int | None = None
    repeats: int | None = None
    max_new_tokens: int | None = None
    prompt_tokens: int | None = None
    block_size: int | None = None
    draft: str | None = None
    suite: str | None = None
    quick: bool = False
    tokenizer: str | None = None
    chat_template: bool | None = None
    system: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    compile: bool = False
    seed: int = 0
    trust_remote_code: bool = False
    force: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if self.suite is not None and self.suite not in SUITES:
            raise InputError(f"--suite: there is no suite {self.suite!r}", hint=f"suites: {', '.join(SUITES)}")
        presets = {**DEFAULTS, **(SUITES[self.suite] if self.suite else {}), **(QUICK if self.quick else {})}
        if self.draft is not None:
            presets["methods"] = (*presets["methods"], "hf-assisted")
        for name, value in presets.items():
            if getattr(self, name) is None:
                set_(self, name, value)
        for name in LISTS:
            values = _distinct(_listed(getattr(self, name)))
            if not values:
                example = ",".join(str(value) for value in DEFAULTS[name])
                raise InputError(f"{_flag(name)}: the list is empty", hint=f"for example {_flag(name)} {example}")
            set_(self, name, values)
        set_(self, "confidence", tuple(_checked("--confidence", name, CONFIDENCES) for name in self.confidence))
        named = [_checked("--methods", str(name), METHODS) for name in self.methods]
        # The table and the files keep one order, whatever the order in which the methods were typed.
        set_(self, "methods", tuple(name for name in METHODS if name in named))
        for name in ("batch_sizes", "cache_blocks"):
            set_(self, name, tuple(sorted(set(_integers(_flag(name), getattr(self, name))))))
        set_(self, "thresholds", _distinct(_plain(value) for value in self.thresholds))
        set_(self, "model", str(self.model))
        set_(self, "output_dir", None if self.output_dir is None else Path(self.output_dir))
        set_(self, "dataset", None if self.dataset is None else str(self.dataset))
        self._check_ranges()
        assert self.points  # raises where τ and measure do not fit

    def _check_ranges(self) -> None:
        for name, least in (
            ("batch_sizes", 1),
            ("cache_blocks", 1),
            ("limit", 1),
            ("repeats", 1),
            ("max_new_tokens", 1),
            ("prompt_tokens", 1),
            ("block_size", 1),
            ("draft_tokens", 0),
        ):
            value = getattr(self, name)
            value = value[0] if isinstance(value, tuple) else value
            if value is not None and value < least:
                raise InputError(
                    f"{_flag(name)}: {value} is too small", hint=f"give a whole number of at least {least}"
                )
        check_seed(self.seed)
        if self.draft is not None and "hf-assisted" not in self.methods:
            raise InputError(
                "--draft: no method of the run uses it", hint="add hf-assisted to --methods, or leave --draft out"
            )
        if self.block_size == 1 and "threshold" in self.methods:
            raise InputError(
                "--block-size: 1 leaves the method threshold nothing to predict ahead",
                hint="give 2 or more, or leave threshold out of --methods (ar is decoding at block size 1)",
            )
        if self.resume and self.force:
            raise InputError(
                "--resume and --force: goes on with what --force would replace", hint="leave one of the two out"
            )

    @property
    def points(self) -> tuple[tuple[Confidence, float | None], ...]:
        """(measure, τ) of the swept methods; τ None is exact, which is the same for every measure and comes once."""
        points: dict[tuple[Confidence, float | None], None] = {}
        for measure in self.confidence:
            for value in self.thresholds:
                own, colon, number = str(value).partition(":")
                if colon and own not in self.confidence:
                    raise InputError(
                        f"--thresholds: {value} is for a measure that is not asked for",
                        hint=f"--confidence names {', '.join(self.confidence)}",
                    )
                if colon and own != measure:
                    continue
                tau = _threshold(number if colon else value, measure)
                points[self.confidence[0] if tau is None else measure, tau] = None
        return tuple(points)

    def resolved(self) -> dict[str, Any]:
        """The options as plain JSON values, for ``meta``."""
        return {
            key: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _checked(flag: str, name: str, known: Iterable[Any]) -> Any:
    if name in known:
        return name
    kind = flag.removeprefix("--").rstrip("s")
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = (f"did you mean {near[0]}? " if near else "") + f"one of {', '.join(known)}"
    raise InputError(f"{flag}: there is no {kind} {name!r}", hint=hint)


def _threshold(value: Any, measure: Confidence) -> float | None:
    try:
        return parse_threshold(value, measure)
    except InputError as error:
        raise InputError(error.message.replace("--threshold ", "--thresholds: "), hint=error.hint) from None


def _plain(value: Any) -> str | float:
    """``"0.90"`` and 0.9 are one τ; what is no number is judged later, with its measure."""
    try:
        return "exact" if value is None else float(value)
    except (TypeError, ValueError):
        return str(value).strip().lower()


def _listed(value: Any) -> Iterable[Any]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value if isinstance(value, Iterable) else [value]


def _integers(flag: str, values: Iterable[Any]) -> list[int]:
    numbers = []
    for value in values:
        try:
            numbers.append(int(str(value)))
        except ValueError:
            raise InputError(f"{flag}: {value!r} is not a whole number", hint=f"for example {flag} 16,32") from None
    return numbers


def _distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
