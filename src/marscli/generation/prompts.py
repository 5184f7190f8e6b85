"""From what the user wrote to token ids: prompt files, chat templates, exactly one beginning-of-sequence token.

A row is one prompt with its own wishes. Rows are read and checked without a tokenizer; `encode` then needs one. Nothing
here knows the model, but for the length of its context.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marscli.core.params import DecodingParams
from marscli.data.rows import RowError, join_parts
from marscli.errors import InputError
from marscli.generation.config import GenerateConfig, stop_strings

OVERRIDES: dict[str, tuple[type, ...]] = {
    "threshold": (str, int, float),
    "max_new_tokens": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "confidence": (str,),
    "seed": (int,),
    "stop": (str, list),
}
_KINDS = {str: "a text", int: "a whole number", float: "a number", list: "a list of texts"}
_ROW_HINT = 'write one object a line, such as {"prompt": "Why is the sky blue?"}'
_MESSAGE_HINT = 'write {"role": "user", "content": "…"}'
_MESSAGES_HINT = f"messages takes a list: {_MESSAGE_HINT} for each turn"
_TEMPLATE_HINT = "change the messages, or use --no-chat-template with a plain prompt"


@dataclass(frozen=True)
class PromptRow:
    """One prompt.

    Attributes:
        prompt: Plain text; None if the row has messages.
        messages: A conversation that ends with a user's (or a tool's) turn; None if the row has a prompt.
        overrides: The row's own values of the keys in `OVERRIDES`.
        extra: Other keys of the row, passed through to its result.
        where: How errors name the row, such as ``data.jsonl, line 3``; empty for the only prompt.
    """

    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    def error(self, message: str, *, hint: str) -> InputError:
        """Make the error that names this row."""
        return InputError(f"{self.where}: {message}" if self.where else message, hint=hint)

    def params(self, cfg: GenerateConfig, block_size: int = 1) -> DecodingParams:
        """Combine the options with the row's own wishes; errors name the row."""
        wishes = {key: value for key, value in self.overrides.items() if key != "stop"}
        try:
            return cfg.params(block_size, **wishes)
        except InputError as error:
            raise self.error(error.message, hint=error.hint) from error

    def stops(self, cfg: GenerateConfig) -> tuple[str, ...]:
        """The row's own stop strings, else those of the options."""
        return stop_strings(self.overrides.get("stop", cfg.stop))


class PromptFile:
    """A JSON-lines file of prompts, read anew by each loop over it, line by line, so that it may be of any length.

    Args:
        path: UTF-8 text with one object a line that has ``prompt`` or ``messages``; empty lines are skipped. What can
            be read only once, such as a pipe, is kept in memory.
        limit: Only the first rows.

    Raises:
        InputError: While looping: the file cannot be read or holds no row, or a line is not a valid row; the line is
            named.
    """

    def __init__(self, path: str | Path, limit: int | None = None) -> None:
        self.path = path
        self.limit = limit
        source = Path(path).expanduser()
        self._pipe = source.exists() and not (source.is_file() or source.is_dir())
        self._rows: list[PromptRow] | None = None
        self.is_cut = False

    def __iter__(self) -> Iterator[PromptRow]:
        if self._pipe and self._rows is None:
            self._rows = list(self._read())
        return iter(self._rows) if self._rows is not None else self._read()

    def _read(self) -> Iterator[PromptRow]:
        """Read up to the limit; `is_cut` then says whether there is more."""
        count = 0
        for number, line in enumerate(self._lines(), start=1):
            if not line.strip():
                continue
            if count == self.limit:
                self.is_cut = True
                return
            yield self._row(number, line)
            count += 1
        if count == 0:
            raise InputError(f"--input {self.path}: the file holds no rows", hint=_ROW_HINT)

    def _lines(self) -> Iterator[str]:
        try:
            # Lines end at "\n" alone: JSON allows U+2028 and the like inside strings.
            with Path(self.path).expanduser().open(encoding="utf-8-sig", newline="\n") as handle:
                yield from handle
        except FileNotFoundError as error:
            raise InputError(f"--input {self.path}: no such file", hint="check the path") from error
        except UnicodeDecodeError as error:
            raise InputError(
                f"--input {self.path}: not UTF-8 text ({error.reason})", hint="save it as UTF-8"
            ) from error
        except OSError as error:
            raise InputError(
                f"--input {self.path}: cannot be read ({error.strerror})", hint="give a JSON-lines file"
            ) from error

    def _row(self, number: int, line: str) -> PromptRow:
        where = f"--input {self.path}, line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{where}: not valid JSON ({error.msg}, column {error.colno})", hint=_ROW_HINT) from error
        return row_from(value, where)


def rows_from(prompts: Any) -> list[PromptRow]:
    """Take what Python callers give: a text, a conversation (list of messages), or a list of these or of rows.

    Raises:
        InputError: Something else, or nothing.
    """
    if isinstance(prompts, str):
        return [PromptRow(prompt=prompts)]
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping):
        prompts = [prompts]
    items = list(prompts)
    if not items:
        raise InputError("there is no prompt", hint="give a text, or a list of texts")
    if all(isinstance(item, Mapping) and "role" in item for item in items):
        return [row_from({"messages": items}, "")]
    rows = []
    for index, item in enumerate(items):
        where = f"prompt {index}" if len(items) > 1 else ""
        if isinstance(item, str):
            item = {"prompt": item}
        elif isinstance(item, list | tuple):
            item = {"messages": item}
        rows.append(row_from(item, where))
    return rows


def row_from(value: Any, where: str) -> PromptRow:
    """Check one object of a prompt file.

    Raises:
        InputError: It is no row; the message names what is wrong and the keys found.
    """
    row = PromptRow(where=where)
    if not isinstance(value, Mapping):
        raise row.error(f"{type(value).__name__} instead of an object", hint="write an object with prompt or messages")
    found = [key for key in ("prompt", "messages") if value.get(key) is not None]
    if len(found) != 1:
        problem = (
            "both prompt and messages"
            if found
            else f"neither prompt nor messages (found: {', '.join(value) or 'no keys'})"
        )
        raise row.error(problem, hint="give each row a prompt (text) or messages (list of role and content)")
    if "prompt" in found and not isinstance(value["prompt"], str):
        raise row.error(f"prompt is {type(value['prompt']).__name__}, not text", hint="write the prompt as a string")
    messages = _messages(row, value["messages"]) if "messages" in found else None
    overrides = {}
    for key, types in OVERRIDES.items():
        wish = value.get(key)
        if wish is None:
            continue
        if isinstance(wish, bool) or not isinstance(wish, types):
            raise row.error(f"{key} is {wish!r}", hint=f"{key} takes {' or '.join(_KINDS[t] for t in types)}")
        overrides[key] = wish
    if "stop" in overrides:
        try:
            stop_strings(overrides["stop"])
        except InputError as error:
            raise row.error(error.message, hint=error.hint) from error
    extra = {key: item for key, item in value.items() if key not in (*OVERRIDES, "prompt")}
    return PromptRow(value.get("prompt"), messages, overrides, extra, where)


def _messages(row: PromptRow, messages: Any) -> list[dict[str, Any]]:
    """Check a conversation, and bring its messages into the form that training gives a template."""
    if not isinstance(messages, list | tuple) or not messages:
        raise row.error("messages is not a list of messages, or empty", hint=_MESSAGES_HINT)
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise row.error(f"messages[{index}] has no role", hint=_MESSAGE_HINT)
        clean = {key: value for key, value in message.items() if value is not None}
        content = clean.get("content", "" if clean.get("tool_calls") else None)
        if content is None:
            raise row.error(f"messages[{index}] has no content", hint=_MESSAGE_HINT)
        if isinstance(content, list):
            try:
                content = join_parts(content, f"messages[{index}]")
            except RowError as error:
                raise row.error(str(error), hint="write the content as a string") from error
        if not isinstance(content, str):
            kind = type(content).__name__
            raise row.error(f"messages[{index}] has {kind} content, not text", hint="write the content as a string")
        checked.append({**clean, "content": content})
    if messages[-1]["role"] == "assistant":
        raise row.error("the last message is the assistant's", hint="leave it out: it is what the model will write")
    return checked


def encode(
    tokenizer: Any,
    row: PromptRow,
    *,
    context_length: int,
    chat_template: bool | None = None,
    system: str | None = None,
) -> tuple[list[int], str]:
    """Turn a row into token ids.

    Args:
        tokenizer: A transformers tokenizer.
        row: The prompt.
        context_length: Prompt and answer together must fit.
        chat_template: Whether the tokenizer's template is used; None where it has one.
        system: System message, put first unless the row has one of its own.

    Returns:
        Token ids with exactly one beginning-of-sequence token where the tokenizer uses one, and the prompt as results
        show it: the row's own text, or the rendered text of its messages.

    Raises:
        InputError: Empty, too long, or refused by the template.
    """
    templated = bool(tokenizer.chat_template) if chat_template is None else chat_template
    if templated and not tokenizer.chat_template:
        raise InputError("--chat-template: the tokenizer has no chat template", hint="use --no-chat-template")
    if not templated and row.messages is not None:
        raise row.error("messages need a chat template", hint="use a model with a chat template, or plain prompts")
    if not templated and system is not None:
        raise InputError(
            "--system: without a chat template there is no place for a system message",
            hint="write it at the beginning of the prompt",
        )
    if templated:
        text = _render(tokenizer, row, system)
    else:
        text = row.prompt or ""
        if not text:
            raise row.error("the prompt is empty", hint="write something for the model to continue")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise row.error(
            f"the prompt holds {text[error.start]!r}, which is half of a character", hint="send UTF-8 text"
        ) from error
    if templated:
        # Templates write their own beginning-of-sequence token; the tokenizer must not add a second one.
        ids = tokenizer(text, add_special_tokens=False).input_ids
    else:
        has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        ids = tokenizer(text, add_special_tokens=not has_bos).input_ids
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
            ids = ids[:-1]  # some tokenizers close every text; here the model is to go on with it
    if not ids:
        raise row.error("the prompt is empty", hint="write something for the model to continue")
    excess = len(ids) + 1 - context_length
    if excess > 0:
        raise row.error(
            f"the prompt has {len(ids)} tokens: {excess} too many for the model's context of {context_length} "
            "with room for an answer",
            hint=f"shorten it to at most {context_length - 1} tokens",
        )
    return ids, row.prompt if row.prompt is not None else text


def _render(tokenizer: Any, row: PromptRow, system: str | None) -> str:
    from jinja2 import TemplateError

    messages = list(row.messages) if row.messages is not None else [{"role": "user", "content": row.prompt or ""}]
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        # A template is code of the checkpoint's author: what it raises on messages that it does not expect is open.
        raise row.error(f"the chat template refuses this: {error}", hint=_TEMPLATE_HINT) from error
