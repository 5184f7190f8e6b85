"""How answers are shown: streamed, traced by colour, and the one line of figures that follows them."""

import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from marscli.cli import console

if TYPE_CHECKING:
    from marscli.generation.api import GenerationResult, TextStream

# By the tokens that came from one forward: 1, 2, 3, 4, 5 and more.
_COLOURS = ("0", "36", "32", "33", "35")
_MOST_THRESHOLDS = 4
_REASONS = ("stop", "length", "context")


def show_stream(stream: "TextStream", *, trace: bool = False) -> "GenerationResult":
    """Write an answer to stdout while it comes, and end its line.

    Args:
        trace: Colour the text by how many tokens came from one forward; without colours a bar stands between forwards.
    """
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    first = True
    for chunk in stream:
        if not trace:
            console.echo(chunk, end="")
        elif coloured:
            assert stream.record is not None, "text comes from a forward"
            console.echo(f"\x1b[{_colour(len(stream.record.tokens))}m{chunk}\x1b[0m", end="")
        else:
            console.echo(chunk if first else f"|{chunk}", end="")
        first = False
    console.echo("")
    if trace:
        _legend(coloured)
    assert stream.result is not None, "an exhausted stream has its result"
    return stream.result


def _colour(count: int) -> str:
    return _COLOURS[min(count, len(_COLOURS)) - 1]


def _legend(coloured: bool) -> None:
    if not coloured:
        console.note("| stands between the forwards")
        return
    names = [f"{count}{'+' if count == len(_COLOURS) else ''}" for count in range(1, len(_COLOURS) + 1)]
    keys = [f"\x1b[0;{_colour(count)}m {name} \x1b[0m" for count, name in enumerate(names, start=1)]
    if not console.settings.quiet:
        sys.stderr.write("tokens from one forward:" + "".join(keys) + "\n")


@dataclass
class Totals:
    """Sums over answers; no answer is kept.

    Attributes:
        exact: The number that stands for exact among the thresholds.
    """

    exact: float
    answers: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    forwards: int = 0
    thresholds: set[float] = field(default_factory=set)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, result: "GenerationResult") -> None:
        """Count one answer."""
        self.answers += 1
        self.prompt_tokens += result.prompt_tokens
        self.tokens += result.completion_tokens
        self.forwards += result.forwards
        self.thresholds.add(result.threshold)
        self.reasons[result.finish_reason] += 1

    def rates(self, seconds: float) -> str:
        """Tokens per second and per forward, for a bar."""
        return f"{self.tokens / seconds:.1f} tokens/s · {self.tokens / self.forwards:.2f} tokens/forward"

    def footer(self, seconds: float) -> str:
        """The line below one answer or all of them."""
        limits = sorted(self.thresholds, reverse=True)
        shown = ["exact" if limit == self.exact else f"{limit:g}" for limit in limits[:_MOST_THRESHOLDS]]
        shown += ["…"] if len(limits) > _MOST_THRESHOLDS else []
        parts = [
            *([count(self.answers, "prompt")] if self.answers != 1 else []),
            count(self.prompt_tokens, "prompt token"),
            count(self.tokens, "token"),
            count(self.forwards, "forward"),
            f"{self.tokens / self.forwards:.2f} tokens/forward",
            f"{self.tokens / seconds:.1f} tokens/s",
            "τ " + ", ".join(shown),
            ", ".join(
                f"{self.reasons[reason]} {reason}" if self.answers > 1 else reason
                for reason in _REASONS
                if self.reasons[reason]
            ),
        ]
        return " · ".join(parts)


def count(number: int, noun: str) -> str:
    """``1 forward``, ``2 forwards``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
