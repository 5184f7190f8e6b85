"""Conversations to token ids, with the place of every response in them.

Two rules. What stands before a response is what the model will be prompted with at decoding time, so the ids of a
prompt here are the ids of that prompt there. And a response ends with the end-of-sequence token that ends it there.
Places are positions, never looked up by token id: a padding token that equals the end-of-sequence token does no harm.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from marscli.data.rows import Conversation, RowError


@dataclass(frozen=True)
class Encoded:
    """One training example as ids; it ends with its last response.

    Attributes:
        ids: int64 (L,).
        turns: ``(start, end)`` of each response in ``ids``, its end-of-sequence token included.
    """

    ids: np.ndarray
    turns: tuple[tuple[int, int], ...]

    @property
    def response_tokens(self) -> int:
        """R."""
        return sum(end - start for start, end in self.turns)

    def cut(self, max_length: int) -> Encoded | None:
        """The first ``max_length`` tokens, or None where no response token is among them."""
        if len(self.ids) <= max_length:
            return self
        turns = tuple((start, min(end, max_length)) for start, end in self.turns if start < max_length)
        # A copy: a view would keep the whole of a long row in memory.
        return Encoded(self.ids[: turns[-1][1]].copy(), turns) if turns else None


@dataclass(frozen=True)
class _Text:
    """A rendered conversation and the character ranges of its responses."""

    text: str
    spans: list[tuple[int, int]]


class Encoder:
    """Encodes conversations with one tokenizer.

    Args:
        tokenizer: A transformers tokenizer.
        eos_token_ids: Every id that ends a response when decoding, at least one. The tokenizer's own, else the first,
            is appended where a template writes none.
        chat_template: Use the tokenizer's chat template, where it has one. Without it prompt and answer are joined as
            they are.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int], *, chat_template: bool = True) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        own = tokenizer.eos_token_id
        self.end = own if own in self.eos_token_ids else eos_token_ids[0]
        self.uses_template = chat_template and bool(tokenizer.chat_template)

    def encode(self, conversation: Conversation) -> list[Encoded]:
        """Encode one conversation: one example as a rule, one a response where the template rewrites earlier turns.

        Raises:
            RowError: The chat template refuses the conversation.
        """
        if not self.uses_template:
            return [self._encode_plain(conversation)]
        return [self._encode_text(text) for text in self._render_turns(conversation)]

    def _encode_plain(self, conversation: Conversation) -> Encoded:
        ids: list[int] = []
        turns = []
        for index, message in enumerate(conversation.messages):
            text = message["content"]
            piece = self._tokens(text)
            if index == 0:
                piece = self._leading_bos(text, piece) + piece
            if message["role"] == "assistant":
                piece.append(self.end)
                turns.append((len(ids), len(ids) + len(piece)))
            ids += piece
        if turns[0][0] == 0:
            raise RowError("no prompt", "the prompt is empty")
        return Encoded(np.array(ids, dtype=np.int64), tuple(turns))

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _leading_bos(self, text: str, ids: list[int]) -> list[int]:
        """The beginning-of-sequence token, if the tokenizer adds one of its own and the text does not start with it."""
        bos = self.tokenizer.bos_token_id
        if bos is None or ids[:1] == [bos]:
            return []
        return [bos] if self.tokenizer(text, verbose=False)["input_ids"][:1] == [bos] else []

    def _render(self, conversation: Conversation, count: int, *, prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                conversation.messages[:count],
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except Exception as error:  # a template is a program of its own and may fail in any way
            raise RowError("refused by the chat template", f"the chat template refuses this row: {error}") from None

    def _render_turns(self, conversation: Conversation) -> list[_Text]:
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        whole = self._render(conversation, answers[-1] + 1)
        spans = []
        for i in answers:
            before = self._render(conversation, i, prompt=True)
            through = whole if i == answers[-1] else self._render(conversation, i + 1)
            if not (whole.startswith(through) and through.startswith(before)):
                # The template shows earlier turns in another form than they were answered in (reasoning left out, say).
                return [self._render_turn(conversation, i) for i in answers]
            spans.append((len(before), len(through)))
        return [_Text(whole, spans)]

    def _render_turn(self, conversation: Conversation, index: int) -> _Text:
        before = self._render(conversation, index, prompt=True)
        through = self._render(conversation, index + 1)
        if not through.startswith(before):
            message = conversation.messages[index]
            if message.get("tool_calls"):
                raise RowError(
                    "refused by the chat template",
                    "the chat template does not continue its own prompt with this tool call",
                )
            through = before + message["content"] + self.tokenizer.convert_ids_to_tokens(self.end)
        return _Text(through, [(len(before), len(through))])

    def _encode_text(self, rendered: _Text) -> Encoded:
        ids, bounds = self._token_bounds(rendered)
        turns = []
        for number, (start, end) in enumerate(bounds):
            last = next((i for i in range(end - 1, start - 1, -1) if ids[i] in self.eos_token_ids), None)
            if last is not None:
                end = last + 1
            else:
                while end - 1 > start and not self.tokenizer.decode([ids[end - 1]]).strip():
                    end -= 1
                if number == len(bounds) - 1:
                    ids = [*ids[:end], self.end]
                    end += 1
            turns.append((start, end))
        ids = ids[: turns[-1][1]]
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:  # the template writes one, and the text begins with another
            ids = ids[1:]
            turns = [(start - 1, end - 1) for start, end in turns]
        if turns[0][0] == 0:
            raise RowError("no prompt", "the chat template renders nothing before the answer")
        return Encoded(np.array(ids, dtype=np.int64), tuple(turns))

    def _token_bounds(self, rendered: _Text) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text and the token ranges of its responses."""
        if self.tokenizer.is_fast:
            encoding = self.tokenizer(
                rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
            starts = [start for start, _ in offsets]
            bounds = [(bisect_left(starts, start), bisect_left(starts, end)) for start, end in rendered.spans]
            if all(
                a < b and (a == 0 or offsets[a - 1][1] <= s)
                for (a, b), (s, _) in zip(bounds, rendered.spans, strict=True)
            ):
                return ids, bounds
        # A token reaches over the start of a response, which no decoder would see: prompt and response are made apart.
        ids, bounds, done = [], [], 0
        for start, end in rendered.spans:
            ids += self._tokens(rendered.text[done:start])
            response = self._tokens(rendered.text[start:end])
            bounds.append((len(ids), len(ids) + len(response)))
            ids += response
            done = end
        return ids, bounds
