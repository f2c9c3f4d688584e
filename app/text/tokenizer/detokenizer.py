"""Incremental detokenizer: token ids to text, one token at a time. The pieces joined are the text of all ids,
however split.
"""

from codecs import utf_8_decode
from collections.abc import Iterable

from .token_bytes import TokenBytes


class Detokenizer:
    """State of one output sequence. Bytes of an unfinished character are held back until it is whole.

    `begins`: the ids start a text of their own (a chat answer); otherwise they go on where a prompt ended,
    and a leading space stays.
    """

    __slots__ = ("_first", "_held", "_skipped", "_strip", "_tokens")

    def __init__(self, tokens: TokenBytes, *, begins: bool = True, skip_special: bool = True) -> None:
        self._tokens = tokens
        self._skipped = tokens.special_ids if skip_special else frozenset[int]()
        self._held = b""
        self._first = begins
        self._strip = tokens.strip[1] if begins else 0

    def push(self, token_id: int) -> str:
        """Return the text that this token finishes; empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        data = self._tokens.inner(token_id)
        if self._first and token_id in self._tokens:
            data = self._tokens.first(token_id)
            self._first = False
        if self._held:
            data = self._held + data
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        """Return the rest of the text: a replacement character where the last character was never
        completed.
        """
        text = utf_8_decode(self._held, "replace", True)[0]
        self._held = b""
        return self._stripped(text) if self._strip else text

    def _stripped(self, text: str) -> str:
        char = self._tokens.strip[0]
        while self._strip and text.startswith(char):
            text = text[len(char) :]
            self._strip -= 1
        if text:
            self._strip = 0
        return text


def decode(tokens: TokenBytes, ids: Iterable[int], *, begins: bool = True, skip_special: bool = True) -> str:
    """Return the text of all ids at once."""
    detokenizer = Detokenizer(tokens, begins=begins, skip_special=skip_special)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])
