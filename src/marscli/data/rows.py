"""Rows of training data: where they come from, which shapes they may have, and what is wrong with a bad one.

Knows files and keys, not tokens. Every row remembers its file and line, so that an error can name them. Rows come one
by one: of a JSON-lines file no more than a line is in memory, of a table no more than a part.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marscli.errors import InputError

FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
HUB_LAYOUT = ("README.md", "data")  # what a folder has that is a copy of a data set of the Hub
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[^:/]+){0,2}")
PAIRS = (("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("question", "answer"))
EXPECTED = "messages; prompt + completion (or response); instruction (+ input) + output; question + answer"


class RowError(ValueError):
    """One row is unusable. ``reason`` is the short name under which such rows are counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Row:
    """One row as it was read.

    Attributes:
        where: ``file:line`` for line-based files, ``source, row N`` else.
        data: The row's keys and values; for a line that is no JSON object, the `RowError` that says so.
    """

    where: str
    data: Mapping[str, Any] | RowError


@dataclass(frozen=True)
class Conversation:
    """A row in the one shape that the rest works with.

    Attributes:
        messages: Chat messages, ``role`` and ``content`` and what else the row gives; the last one is the assistant's.
        tools: Tool descriptions for the chat template, if the row has any.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


def check_source(source: str) -> None:
    """Refuse a source that cannot be data, without reading it.

    Raises:
        InputError: A file that is not there, or of a kind that is not read, or a name that is neither file nor Hub id.
    """
    path = Path(source)
    if path.is_file():
        if path.suffix not in FILE_SUFFIXES:
            raise InputError(
                f"--dataset {source}: files ending in {path.suffix or 'nothing'} are not read",
                hint=f"use one of {', '.join(FILE_SUFFIXES)}",
            )
    elif (folder := Path(_split_source(source)[0])).is_dir():
        if not any((folder / name).exists() for name in HUB_LAYOUT):
            found = sorted(p.name for p in folder.iterdir() if p.suffix in FILE_SUFFIXES)
            listed = f"files in it: {', '.join(found[:5])}" if found else f"it holds no {', '.join(FILE_SUFFIXES)} file"
            raise InputError(f"--dataset {source} is a folder", hint=f"name a file; {listed}")
    elif path.suffix in FILE_SUFFIXES or not HUB_ID.fullmatch(source):
        folder = path.parent
        near = []
        if folder.is_dir():
            near = difflib.get_close_matches(path.name, [p.name for p in folder.iterdir()], n=3)
        hint = (
            f"is it {' or '.join(str(folder / name) for name in near)}?"
            if near
            else ("give a .jsonl, .json, .parquet or .csv file, or a Hub id such as org/name:config:split")
        )
        raise InputError(f"--dataset {source}: no such file", hint=hint)


def read_rows(source: str, *, streaming: bool = False) -> Iterator[Row]:
    """Read a file or a Hub data set row by row.

    Args:
        source: A ``.jsonl``, ``.json``, ``.parquet`` or ``.csv`` file, or ``org/name[:config[:split]]``, or a folder
            laid out as a Hub data set, with config and split likewise; the split is ``train`` if none is named.
        streaming: Read tables and Hub data sets without a copy in the cache of `datasets`, for sets larger than the
            disk. A ``.json`` file is one value and always read whole.

    Raises:
        InputError: The file cannot be read, or the data set cannot be loaded.
    """
    check_source(source)
    path = Path(source)
    if not path.is_file():
        name, config, split = _split_source(source)
        yield from _read_table(source, name, config or None, split or "train", streaming=streaming)
    elif path.suffix == ".json":
        yield from _read_json(source)
    elif path.suffix == ".jsonl":
        yield from _read_lines(source)
    else:
        yield from _read_table(source, path.suffix[1:], None, "train", data_files=source, streaming=streaming)


def _split_source(source: str) -> tuple[str, str, str]:
    """Name, config and split, the latter two empty where they are not given."""
    name, config, split = [*source.split(":"), "", ""][:3]
    return name, config, split


@contextmanager
def _reading(source: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"--dataset {source} is not UTF-8 text ({error})", hint="convert it to UTF-8") from None
    except OSError as error:
        raise InputError(f"--dataset {source} cannot be read: {error.strerror}", hint="check its permissions") from None


def _read_lines(source: str) -> Iterator[Row]:
    # utf-8-sig: files written on Windows often start with a byte order mark.
    with _reading(source), Path(source).open(encoding="utf-8-sig") as file:
        # Not splitlines(): it also splits at U+2028 and the like, which JSON allows inside strings.
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{source}:{number}"
                try:
                    yield _as_row(where, json.loads(line))
                except json.JSONDecodeError as error:
                    yield Row(where, RowError("not JSON", f"not a JSON line: {error.msg} at column {error.colno}"))


def _read_json(source: str) -> Iterator[Row]:
    with _reading(source):
        text = Path(source).read_text(encoding="utf-8-sig")
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        if "\n" in text.strip() and text.lstrip().startswith("{"):  # JSON lines under the shorter name
            yield from _read_lines(source)
            return
        raise InputError(
            f"{source}:{error.lineno}: not JSON: {error.msg}", hint="a .json file holds one list of objects"
        ) from None
    if isinstance(values, dict):
        lists = [
            key for key, value in values.items() if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        values = values[lists[0]] if len(lists) == 1 and "messages" not in values else [values]
    if not isinstance(values, list):
        raise InputError(f"--dataset {source} holds no list of objects", hint="a .json file holds one list of objects")
    for number, value in enumerate(values, start=1):
        yield _as_row(f"{source}, row {number}", value)


def _read_table(source: str, name: str, config: str | None, split: str, **options: Any) -> Iterator[Row]:
    import datasets

    try:
        for number, value in enumerate(datasets.load_dataset(name, config, split=split, **options), start=1):
            yield _as_row(f"{source}, row {number}", value)
    except Exception as error:  # the loaders raise whatever their file format's library raises
        cause = str(error).strip().splitlines()
        raise InputError(
            f"--dataset {source} cannot be loaded: {cause[0] if cause else type(error).__name__}",
            hint="check that the file is what its name says"
            if "data_files" in options
            else "no such file is here either; for a Hub id check name, configuration, split and the network",
        ) from None


def _as_row(where: str, value: Any) -> Row:
    if isinstance(value, dict):
        return Row(where, value)
    return Row(where, RowError("not an object", f"a JSON object is expected, not {_kind(value)}"))


def to_conversation(
    row: Row, *, prompt_field: str | None = None, response_field: str | None = None, system: str | None = None
) -> Conversation:
    """Bring a row into the one shape that the rest works with.

    Args:
        row: As read.
        prompt_field: Key of the prompt, where it is not one of the usual names.
        response_field: Key of the response, likewise.
        system: System message for rows that have none of their own.

    Raises:
        RowError: The keys are not known ones, or a value is missing, empty or of the wrong kind.
    """
    data = row.data
    if isinstance(data, RowError):
        raise data
    named = prompt_field is not None or response_field is not None
    if not named and (data.get("messages") is not None or list(data) == ["messages"]):
        messages = _check_messages(data["messages"])
    else:
        messages = _pair(data, *_pair_keys(data, prompt_field, response_field))
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise RowError("no assistant turn", "no message has the role assistant, so there is nothing to learn")
    if answers[0] == 0:
        raise RowError("no prompt", "the first message is the assistant's: nothing stands before it")
    if system is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
        answers[-1] += 1
    tools = data.get("tools")
    if isinstance(tools, str):  # a common habit in parquet, whose columns cannot hold free-form objects
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError:
            raise RowError("bad tools", "'tools' must be a list of tools, or one as JSON text") from None
    return Conversation(messages[: answers[-1] + 1], tools or None)


def _pair_keys(data: Mapping[str, Any], prompt: str | None, response: str | None) -> tuple[str, str]:
    pairs = PAIRS
    if prompt is not None or response is not None:
        pairs = tuple((prompt or p, response or r) for p, r in PAIRS)
    for pair in pairs:
        if all(key in data for key in pair):
            return pair
    expected = EXPECTED
    if prompt and response:
        expected = f"{prompt} + {response}"
    elif prompt or response:
        expected = f"{prompt or 'a usual prompt key'} + {response or 'a usual response key'}"
    raise RowError("unknown keys", f"keys found: {', '.join(map(str, data)) or 'none'}; keys expected: {expected}")


def _pair(data: Mapping[str, Any], prompt_key: str, response_key: str) -> list[dict[str, Any]]:
    prompt, response = data[prompt_key], data[response_key]
    # Either side may itself be a list of messages.
    before = _check_messages(prompt) if isinstance(prompt, list) else None
    after = _check_messages(response) if isinstance(response, list) else None
    if before is None:
        text = _text(prompt, prompt_key)
        if prompt_key == "instruction" and data.get("input"):
            text = f"{text}\n\n{_text(data['input'], 'input')}"
        before = [{"role": "user", "content": text}]
    if after is None:
        text = _text(response, response_key)
        if not text.strip():
            raise RowError("empty response", f"{response_key!r} is empty")
        after = [{"role": "assistant", "content": text}]
    return before + after


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RowError("bad messages", f"'messages' must be a list of messages, not {_kind(messages)}")
    checked = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            found = ", ".join(map(str, message)) if isinstance(message, dict) else _kind(message)
            raise RowError("bad messages", f"message {number}: keys found: {found}; keys expected: role, content")
        # Tables fill the keys that a message lacks with null.
        clean = {key: value for key, value in message.items() if value is not None}
        content = clean.get("content")
        if isinstance(content, list):
            content = join_parts(content, f"message {number}")
        if "tool_calls" in clean:
            clean["tool_calls"] = [_plain_call(call) for call in clean["tool_calls"]]
            content = "" if content is None else content
        if content is None:
            raise RowError("bad messages", f"message {number} ({message['role']}) has no content")
        clean["content"] = _text(content, f"message {number}")
        if message["role"] == "assistant" and not clean["content"].strip() and not clean.get("tool_calls"):
            raise RowError("empty response", f"message {number}: the assistant's content is empty")
        checked.append(clean)
    return checked


def join_parts(parts: list[Any], where: str) -> str:
    """Join content that is given as a list of parts, ``{"type": "text", "text": …}``.

    Args:
        parts: The list.
        where: What to call the message in an error.

    Raises:
        RowError: A part that is no text.
    """
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise RowError("bad messages", f"{where}: content part of type {kind!r}, only text is supported")
    return "".join(part["text"] for part in parts)


def _plain_call(call: Any) -> Any:
    """Chat templates print a call's arguments as JSON themselves, so a string of JSON would be quoted twice."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
        except json.JSONDecodeError:
            return call
    return call


def _text(value: Any, key: str) -> str:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RowError("not text", f"{key!r} holds {value[error.start]!r}, which is half of a character") from None
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):  # tables read a column of numerals as numbers
        return str(value)
    raise RowError("not text", f"{key!r} must be text, not {_kind(value)}")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (list, dict, str)) and not value:
        return f"an empty {'list' if isinstance(value, list) else 'object' if isinstance(value, dict) else 'text'}"
    return {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }.get(type(value), type(value).__name__)
