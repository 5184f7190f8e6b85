"""From what the user wrote to token ids: prompt files, chat templates, exactly one beginning-of-sequence token.

A row is one prompt with its own wishes. Rows are read and checked without a tokenizer; `encode` then needs one. Nothing
here knows the model, but for the length of its context.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marscli.core.params import DecodingParams
from marscli.errors import InputError
from marscli.generation.config import GenerateConfig

OVERRIDES: dict[str, tuple[type, ...]] = {
    "threshold": (str, int, float),
    "max_new_tokens": (int,),
    "temperature": (int, float),
    "seed": (int,),
}
_KINDS = {str: "a text", int: "a whole number", float: "a number"}
_TEMPLATE_HINT = "change the messages, or use --no-chat-template with a plain prompt"


@dataclass(frozen=True)
class PromptRow:
    """One prompt.

    Attributes:
        prompt: Plain text; None if the row has messages.
        messages: A conversation that ends with a user's (or a tool's) turn; None if the row has a prompt.
        overrides: The row's own threshold, max_new_tokens, temperature, seed.
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
        try:
            return cfg.params(block_size, **self.overrides)
        except InputError as error:
            raise self.error(error.message, hint=error.hint) from error


def read_rows(path: str | Path) -> list[PromptRow]:
    """Read a JSON-lines file of prompts.

    Args:
        path: UTF-8 text with one object a line that has ``prompt`` or ``messages``; empty lines are skipped.

    Returns:
        At least one row.

    Raises:
        InputError: The file cannot be read or holds no row, or a line is not a valid row; the line is named.
    """
    source = Path(path).expanduser()
    try:
        text = source.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"--input {path}: no such file", hint="check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--input {path}: not UTF-8 text ({error.reason})", hint="save it as UTF-8") from error
    except OSError as error:
        raise InputError(f"--input {path}: cannot be read ({error.strerror})", hint="give a JSON-lines file") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"--input {path}, line {number}"
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(
                    f"{where}: not valid JSON ({error.msg}, column {error.colno})",
                    hint='write one object a line, such as {"prompt": "Why is the sky blue?"}',
                ) from error
            rows.append(row_from(value, where))
    if not rows:
        raise InputError(
            f"--input {path}: the file holds no rows",
            hint='write one object a line, such as {"prompt": "Why is the sky blue?"}',
        )
    return rows


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
    if "messages" in found:
        _check_messages(row, value["messages"])
    overrides = {}
    for key, types in OVERRIDES.items():
        wish = value.get(key)
        if wish is None:
            continue
        if isinstance(wish, bool) or not isinstance(wish, types):
            raise row.error(f"{key} is {wish!r}", hint=f"{key} takes {' or '.join(_KINDS[t] for t in types)}")
        overrides[key] = wish
    extra = {key: item for key, item in value.items() if key not in (*OVERRIDES, "prompt")}
    return PromptRow(value.get("prompt"), value.get("messages"), overrides, extra, where)


def _check_messages(row: PromptRow, messages: Any) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise row.error("messages is not a list of messages, or empty", hint='write [{"role": "user", "content": "…"}]')
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise row.error(f"messages[{index}] has no role", hint='write {"role": "user", "content": "…"}')
        if message.get("content") is None and not message.get("tool_calls"):
            raise row.error(f"messages[{index}] has no content", hint='write {"role": "user", "content": "…"}')
        if not isinstance(message.get("content", ""), str | list | None):
            kind = type(message["content"]).__name__
            raise row.error(f"messages[{index}] has {kind} content, not text", hint="write the content as a string")
    if messages[-1]["role"] == "assistant":
        raise row.error("the last message is the assistant's", hint="leave it out: it is what the model will write")


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
