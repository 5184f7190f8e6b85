"""All sources to encoded examples, with a count of what was dropped and why."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from marscli.data.encoding import Encoded, Encoder
from marscli.data.rows import Row, RowError, check_source, read_rows, to_conversation
from marscli.data.store import ExampleStore
from marscli.errors import InputError

CUT_OFF = "response cut off by --max-length"

# Examples among which a stream draws the next one: some tens of megabytes, and a few seconds to fill.
SHUFFLE_BUFFER = 8192


@dataclass
class DataReport:
    """What became of the rows.

    Attributes:
        rows: Rows read.
        used: Rows trained on.
        dropped: Rows left out, by reason.
        truncated: Rows used whose end was cut off by the length limit.
        examples: Examples made of the used rows; more than rows where a template needs one a turn.
        tokens: L summed over examples.
        response_tokens: R summed over examples.
    """

    rows: int = 0
    used: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    examples: int = 0
    tokens: int = 0
    response_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """As `summary.json` holds it."""
        return {**vars(self), "dropped": dict(self.dropped)}


class ExampleReader:
    """Reads sources into encoded examples and counts what it leaves out.

    Args:
        sources: Files and Hub ids, see `rows.read_rows`.
        encoder: Tokenizer and its end-of-sequence tokens.
        max_length: Tokens of an example kept; a row whose whole response lies beyond is dropped and counted.
        prompt_field: See `rows.to_conversation`.
        response_field: See `rows.to_conversation`.
        system: See `rows.to_conversation`.
        skip_bad_rows: Count bad rows instead of refusing them.
        limit: Read only the first rows, of all sources together.

    Attributes:
        report: What became of the rows read so far.
    """

    def __init__(
        self,
        sources: Sequence[str],
        encoder: Encoder,
        *,
        max_length: int,
        prompt_field: str | None = None,
        response_field: str | None = None,
        system: str | None = None,
        skip_bad_rows: bool = False,
        limit: int | None = None,
    ) -> None:
        self.sources = sources
        self.encoder = encoder
        self.max_length = max_length
        self.keys = {"prompt_field": prompt_field, "response_field": response_field, "system": system}
        self.skip_bad_rows = skip_bad_rows
        self.limit = limit
        self.report = DataReport()
        self._bad: list[tuple[str, RowError]] = []

    def read_all(self) -> ExampleStore:
        """Read everything into memory.

        Raises:
            InputError: A source that cannot be read, bad rows (file, line, keys found, keys expected; all are counted
                before the first is named), or no row left.
        """
        store = ExampleStore()
        for example in self._examples(streaming=False):
            store.append(example)
        self._refuse_bad_rows()
        self._refuse_nothing()
        return store

    def stream(self, seed: int) -> Iterator[Encoded]:
        """Read for ever, an example at a time: pass after pass, each in an order of its own.

        The order is a function of the seed alone: that of the sources, shuffled within a buffer.

        Raises:
            InputError: As `read_all`, but at the first bad row.
        """
        self.report = DataReport()
        for number in count():
            before = self.report.examples
            draw = random.Random(f"{seed} {number}")
            buffer: list[Encoded] = []
            for example in self._examples(streaming=True):
                if len(buffer) < SHUFFLE_BUFFER:
                    buffer.append(example)
                    continue
                place = draw.randrange(SHUFFLE_BUFFER)
                yield buffer[place]
                buffer[place] = example
            if self.report.examples == before:
                self._refuse_nothing()
            draw.shuffle(buffer)
            yield from buffer

    def _examples(self, *, streaming: bool) -> Iterator[Encoded]:
        report = self.report
        for row in islice(self._rows(streaming), self.limit):
            report.rows += 1
            try:
                encoded = self.encoder.encode(to_conversation(row, **self.keys))
            except RowError as error:
                report.dropped[error.reason] += 1
                if not self.skip_bad_rows:
                    self._bad.append((row.where, error))
                if streaming:
                    self._refuse_bad_rows()
                continue
            kept = [cut for cut in (example.cut(self.max_length) for example in encoded) if cut is not None]
            if not kept:
                report.dropped[CUT_OFF] += 1
                continue
            report.used += 1
            report.truncated += any(len(a.ids) > self.max_length for a in encoded)
            for example in kept:
                report.examples += 1
                report.tokens += len(example.ids)
                report.response_tokens += example.response_tokens
                yield example

    def _rows(self, streaming: bool) -> Iterator[Row]:
        for source in self.sources:
            check_source(source)
        for source in self.sources:
            empty = True
            for row in read_rows(source, streaming=streaming):
                empty = False
                yield row
            if empty:
                raise InputError(f"--dataset {source} is empty", hint="it must hold at least one row")

    def _refuse_bad_rows(self) -> None:
        if not self._bad:
            return
        where, error = self._bad[0]
        others = len(self._bad) - 1
        more = f" ({others} more bad row{'s' * (others > 1)})" if others else ""
        hint = (
            "name the keys with --prompt-field and --response-field, or"
            if error.reason == "unknown keys"
            else "mend it, or"
        )
        raise InputError(f"{where}: {error}{more}", hint=f"{hint} leave bad rows out with --skip-bad-rows")

    def _refuse_nothing(self) -> None:
        if self.report.examples:
            return
        reasons = ", ".join(f"{number} {reason}" for reason, number in self.report.dropped.items())
        hint = (
            f"raise --max-length above {self.max_length}"
            if self.report.dropped[CUT_OFF]
            else "look at the rows' keys and values"
        )
        raise InputError(f"no row is left to train on: {reasons}", hint=hint)
