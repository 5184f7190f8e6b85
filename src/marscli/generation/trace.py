"""Which forward pass gave which text: spans for the terminal, and a self-contained page.

A span is the text of one token. Where bytes of a character come as tokens of their own, the character belongs to the
last of them, and the others have no text.
"""

import html
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from marscli.generation.api import GenerationResult
from marscli.generation.detokenize import TextBuilder
from marscli.output import write_text

Kind = Literal["next", "verified", "unverified"]
MOST_SHOWN = 5  # tokens from one forward that have a colour of their own; more share the last one
_SAID = {"next": "from real tokens alone", "verified": "draft of mask {}, verified", "unverified": "kept from mask {}"}


@dataclass(frozen=True)
class Span:
    """The text of one token.

    Attributes:
        text: Possibly empty.
        forward: Number of the forward that accepted it, from 1.
        count: Tokens that this forward gave.
        kind: ``next`` (predicted from real tokens alone), ``verified`` (a draft) or ``unverified`` (kept as τ passed).
        offset: The mask that predicted it, from 1; 0 for real tokens.
        confidence: In the request's measure.
        special: Whether it is a special token, which text does not show.
    """

    text: str
    forward: int
    count: int
    kind: Kind
    offset: int
    confidence: float
    special: bool


def spans(result: GenerationResult, tokenizer: Any) -> Iterator[Span]:
    """The answer token by token; the spans' texts joined equal the result's text."""
    builder = TextBuilder(tokenizer)
    special = set(tokenizer.all_special_ids)
    room = len(result.text)  # a stop string is no part of the text
    held: Span | None = None
    for number, record in enumerate(result.records, start=1):
        kinds = _kinds(record.offsets)
        for place, token in enumerate(record.tokens):
            if held is not None:
                yield held
            text = builder.push([token])[:room]
            room -= len(text)
            offset, confidence = record.offsets[place], record.confidences[place]
            held = Span(text, number, len(record.tokens), kinds[place], offset, confidence, token in special)
    if held is not None:
        yield replace(held, text=held.text + builder.finish()[:room])


def _kinds(offsets: Sequence[int]) -> list[Kind]:
    """Right drafts come first in a record, then the token that real tokens give, then what τ let pass."""
    own = offsets.index(0) if 0 in offsets else len(offsets)
    return ["verified" if place < own else "next" if place == own else "unverified" for place in range(len(offsets))]


def write_page(path: Path, result: GenerationResult, tokenizer: Any, title: str) -> None:
    """Write the trace of one answer as a page that needs nothing else; the old file stays if that fails.

    Args:
        title: What the answer came from, such as the model's name.
    """
    body = "".join(_span_html(span) for span in spans(result, tokenizer))
    parts = {
        "TITLE": html.escape(title),
        "FACTS": _facts(result),
        "LEGEND": _legend(result),
        "PROMPT": html.escape(result.prompt),
        "ANSWER": body,
    }
    page = files("marscli.generation").joinpath("trace.html").read_text(encoding="utf-8")
    write_text(path, re.sub("@@([A-Z]+)@@", lambda match: parts[match[1]], page))


def _span_html(span: Span) -> str:
    said = _SAID[span.kind].format(span.offset)
    tip = f"forward {span.forward} · {_tokens(span.count)} · {said} · confidence {span.confidence:.3f}"
    text = html.escape(span.text).replace("\n", '<i class="nl"></i>\n')
    if span.special:
        text += '<i class="end"></i>'
    return (
        f'<span class="t c{min(span.count, MOST_SHOWN)} {span.kind}" data-f="{span.forward}" title="{tip}">'
        f"{text}</span>"
    )


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _facts(result: GenerationResult) -> str:
    facts = {
        "tokens": f"{result.completion_tokens}",
        "forwards": f"{result.forwards}",
        "tokens / forward": f"{result.tokens_per_forward:.2f}",
        "tokens / s": f"{result.tokens_per_second:.1f}",
        "τ": f"{result.threshold:g}",
        "verified": "yes" if result.verified else "no",
        "finish": result.finish_reason,
    }
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())


def _legend(result: GenerationResult) -> str:
    counts = Counter(min(len(record.tokens), MOST_SHOWN) for record in result.records)
    top = max(counts.values())
    lines = []
    for count in range(1, max(counts) + 1):
        name = f"{count}{'+' if count == MOST_SHOWN else ''}"
        width = 100 * counts[count] / top
        lines.append(
            f'<li><span class="key c{count}">{name}</span><span class="bar"><i class="c{count}" '
            f'style="width:{width:.1f}%"></i></span><span class="n">{counts[count]}</span></li>'
        )
    return "".join(lines)
