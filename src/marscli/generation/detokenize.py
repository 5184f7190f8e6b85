"""Text that grows with its tokens: chunks that never have to be taken back, and joined equal the final text.

The final text is ``tokenizer.decode(ids, skip_special_tokens=True)``. A chunk is what all tokens so far decode to,
beyond what was given out before, less an end that later tokens may still change: bytes of an unfinished character, and
the spaces that a clean-up of punctuation may remove. Decoding everything anew at each step keeps this exact for every
kind of tokenizer; it costs far less than a forward pass.
"""

import re
from collections.abc import Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_CLEANED_UP = 8  # characters; the longest pattern that the clean-up of spaces looks for is shorter


class TextBuilder:
    """Turns tokens into chunks of text.

    Example:
        >>> builder = TextBuilder(tokenizer)
        >>> chunks = [builder.push(tokens) for tokens in steps] + [builder.finish()]
        >>> "".join(chunks) == tokenizer.decode(sum(steps, []), skip_special_tokens=True)
        True
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._ids: list[int] = []
        self._given = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the text that is settled by them, possibly empty."""
        self._ids += ids
        return self._give(self._settled())

    def finish(self) -> str:
        """Return the rest of the text; no tokens follow."""
        return self._give(self._decode(self._ids))

    def _give(self, text: str) -> str:
        chunk = text[self._given :]
        self._given += len(chunk)
        return chunk

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _settled(self) -> str:
        """Text of the tokens so far that no later token can change."""
        text = self._decode(self._ids[: self._end_of_whole_tokens()]).rstrip(_REPLACEMENT)
        if self._cleans_up:
            space = text.find(" ", max(0, len(text) - _CLEANED_UP))
            text = text if space < 0 else text[:space]
        return text

    def _end_of_whole_tokens(self) -> int:
        """Where the run of single-byte tokens at the end begins: it decodes as a whole, to text or to U+FFFD only."""
        end = len(self._ids)
        while end > 0:
            token = self._ids[end - 1]
            if token not in self._special and not self._is_byte(token):
                break
            end -= 1
        return end

    def _is_byte(self, token: int) -> bool:
        text = self._tokenizer.convert_ids_to_tokens(token)
        return text is not None and _BYTE_TOKEN.fullmatch(str(text)) is not None
