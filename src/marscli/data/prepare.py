"""All sources to encoded examples, with a count of what was dropped and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from marscli.data.encoding import Encoded, Encoder
from marscli.data.rows import Conversation, Row, RowError, check_source, read_rows, to_conversation
from marscli.errors import InputError

CUT_OFF = "response cut off by --max-length"


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


@dataclass
class Prepared:
    """Conversations that were read and checked, still without a tokenizer."""

    conversations: list[tuple[str, Conversation]]
    report: DataReport
    skip_bad_rows: bool
    bad: list[tuple[str, RowError]] = field(default_factory=list)

    def refuse_bad_rows(self) -> None:
        """Raise for the bad rows found so far, unless they are to be skipped."""
        if self.bad and not self.skip_bad_rows:
            where, error = self.bad[0]
            others = len(self.bad) - 1
            more = f" ({others} more bad row{'s' * (others > 1)})" if others else ""
            hint = (
                "name the keys with --prompt-field and --response-field, or"
                if error.reason == "unknown keys"
                else "mend it, or"
            )
            raise InputError(f"{where}: {error}{more}", hint=f"{hint} leave bad rows out with --skip-bad-rows")

    def drop(self, where: str, error: RowError) -> None:
        """Count a bad row."""
        self.bad.append((where, error))
        self.report.dropped[error.reason] += 1


def read_conversations(
    sources: Sequence[str],
    *,
    prompt_field: str | None = None,
    response_field: str | None = None,
    system: str | None = None,
    skip_bad_rows: bool = False,
    limit: int | None = None,
) -> Prepared:
    """Read and check all rows; needs no tokenizer.

    Args:
        sources: Files and Hub ids, see `rows.read_rows`.
        prompt_field: See `rows.to_conversation`.
        response_field: See `rows.to_conversation`.
        system: See `rows.to_conversation`.
        skip_bad_rows: Count bad rows instead of refusing them.
        limit: Read only the first rows, of all sources together.

    Raises:
        InputError: A source that cannot be read, a bad row (file, line, keys found, keys expected), or no row at all.
    """
    for source in sources:
        check_source(source)
    prepared = Prepared([], DataReport(), skip_bad_rows)

    def rows() -> Sequence[Row]:
        for source in sources:
            before = prepared.report.rows
            yield from read_rows(source)
            if prepared.report.rows == before:
                raise InputError(f"--dataset {source} is empty", hint="it must hold at least one row")

    for row in islice(rows(), limit):
        prepared.report.rows += 1
        try:
            conversation = to_conversation(row, prompt_field=prompt_field, response_field=response_field, system=system)
        except RowError as error:
            prepared.drop(row.where, error)
        else:
            prepared.conversations.append((row.where, conversation))
    prepared.refuse_bad_rows()
    return prepared


def encode_conversations(prepared: Prepared, encoder: Encoder, *, max_length: int) -> list[Encoded]:
    """Encode what `read_conversations` found and complete its report.

    Args:
        prepared: Its ``report`` is completed in place; its conversations are let go of.
        encoder: Tokenizer and its end-of-sequence tokens.
        max_length: Tokens of an example kept; a row whose whole response lies beyond is dropped and counted.

    Raises:
        InputError: A row that the chat template refuses, or no row left.
    """
    report = prepared.report
    examples = []
    for where, conversation in prepared.conversations:
        try:
            encoded = encoder.encode(conversation)
        except RowError as error:
            prepared.drop(where, error)
            continue
        kept = [cut for cut in (example.cut(max_length) for example in encoded) if cut is not None]
        if not kept:
            report.dropped[CUT_OFF] += 1
            continue
        report.used += 1
        report.truncated += any(len(a.ids) > max_length for a in encoded)
        examples += kept
    prepared.conversations.clear()
    prepared.refuse_bad_rows()
    report.examples = len(examples)
    report.tokens = sum(len(example.ids) for example in examples)
    report.response_tokens = sum(example.response_tokens for example in examples)
    if not examples:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped.items())
        hint = (
            f"raise --max-length above {max_length}" if report.dropped[CUT_OFF] else "look at the rows' keys and values"
        )
        raise InputError(f"no row is left to train on: {reasons}", hint=hint)
    return examples
