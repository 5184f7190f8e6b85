"""Text that grows with its tokens: chunks that never have to be taken back, and joined equal the final text.

The final text is ``tokenizer.decode(ids, skip_special_tokens=True)``, cut before a stop string. A chunk is what the
tokens so far decode to, beyond what was given out before, less an end that later tokens may still change: bytes of an
unfinished character, the spaces that a clean-up of punctuation may remove, and what may become a stop string.

Only the last tokens are decoded anew at a step, so that long answers cost no more a token than short ones; how far back
is checked against the text itself, since tokenizers treat the first token of a text specially.

An answer is complete at the first token after which the decoded text holds a stop string. That depends on the tokens
alone, not on how many of them came from one forward pass.
"""

import re
from collections.abc import Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_CLEANED_UP = 8  # characters; the longest pattern that the clean-up of spaces looks for is shorter
_WINDOW = 64  # tokens that are decoded anew at a step, at most, where nothing holds them back
_KEPT = 16  # tokens that remain in the window when it moves on
_AT_THE_START = 8  # characters by which the start of a window may decode otherwise than within the whole


class TextBuilder:
    """Turns tokens into chunks of text.

    Args:
        tokenizer: A transformers tokenizer.
        stops: Strings that end the text; it is cut before the first of them. One that is a special token, which text
            never shows, ends it too.

    Attributes:
        ids: Tokens so far; with a stop string up to the token that completes it.
        stopped: Whether a stop string is complete. No more tokens may be pushed then.

    Example:
        >>> builder = TextBuilder(tokenizer)
        >>> chunks = [builder.push(tokens) for tokens in steps] + [builder.finish()]
        >>> "".join(chunks) == tokenizer.decode(sum(steps, []), skip_special_tokens=True)
        True
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.ids: list[int] = []
        self.stopped = False
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        added = tokenizer.added_tokens_decoder if stops else {}
        special = {str(token): index for index, token in added.items() if token.special}
        self._stop_ids = {special[stop] for stop in stops if stop in special}
        self._stops = [stop for stop in stops if stop not in special]
        self._longest_stop = max(map(len, self._stops), default=0)
        self._given = 0  # characters of the text that were given out
        self._window = 0  # the token where the decoded window begins
        self._origin = 0  # characters of the text before it
        self._end: int | None = None  # where a stop string begins

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the text that is settled by them, possibly empty."""
        if self._stops or self._stop_ids:
            for token in ids:
                self.ids.append(token)
                self.stopped = token in self._stop_ids or self._holds_stop()
                if self.stopped:
                    return self.finish()
        else:
            self.ids += ids
        chunk = self._give(self._settled())
        self._move_window()
        return chunk

    def text(self) -> str:
        """The whole text of the tokens so far, as it is if no more follow."""
        text = self._decode(self.ids)
        return text if self._end is None else text[: self._end]

    def finish(self) -> str:
        """Return the rest of the text; no tokens follow."""
        return self._give(self.text()[self._origin :])

    def _give(self, text: str) -> str:
        """What of the window's text was not given out before."""
        chunk = text[self._given - self._origin :]
        self._given += len(chunk)
        return chunk

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _holds_stop(self) -> bool:
        """Look for the first stop string; what was looked through before holds none."""
        if not self._stops:
            return False
        text = self._decode(self.ids[self._window :])
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._end = self._origin + min(places)
        return bool(places)

    def _settled(self) -> str:
        """The window's text, as far as no later token can change it."""
        text = self._decode(self.ids[self._window : self._end_of_whole_tokens()]).rstrip(_REPLACEMENT)
        if self._cleans_up:
            space = text.find(" ", max(0, len(text) - _CLEANED_UP))
            text = text if space < 0 else text[:space]
        longest = max((_overlap(text, stop) for stop in self._stops), default=0)
        return text[: len(text) - longest]

    def _end_of_whole_tokens(self) -> int:
        """Where the run of single-byte tokens at the end begins: it decodes as a whole, to text or to U+FFFD only."""
        end = len(self.ids)
        while end > self._window:
            token = self.ids[end - 1]
            if token not in self._special and not self._is_byte(token):
                break
            end -= 1
        return end

    def _is_byte(self, token: int) -> bool:
        text = self._tokenizer.convert_ids_to_tokens(token)
        return text is not None and _BYTE_TOKEN.fullmatch(str(text)) is not None

    def _move_window(self) -> None:
        """Leave tokens behind whose text is given out, if what remains decodes as it did within the whole."""
        start = len(self.ids) - _KEPT
        if start - self._window < _WINDOW - _KEPT:
            return
        if self._is_byte(self.ids[start]):
            return  # a run of bytes decodes as a whole; the window moves on behind it
        whole, short = self._decode(self.ids[self._window :]), self._decode(self.ids[start:])
        origin = self._origin + len(whole) - len(short)
        looked_at = self._origin + len(whole) - self._longest_stop
        if min(self._given, looked_at) - origin >= _AT_THE_START and whole.endswith(short[_AT_THE_START:]):
            self._window, self._origin = start, origin


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that may become a stop string.

    >>> _overlap("one\\n", "\\n\\n"), _overlap("one", "\\n\\n")
    (1, 0)
    """
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
