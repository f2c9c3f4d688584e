"""Incremental detokenizer, and the UTF-8 bytes of each token id that it joins, read from the decoder of
tokenizer.json.

Decoders here work token by token, so a text is the concatenation of its tokens' bytes (the first token of
a text may differ: SentencePiece drops the space it put before the text).

One difference from the tokenizers library is on purpose: where byte-fallback tokens form no valid UTF-8,
the library replaces every byte of the whole run by U+FFFD, this replaces only what is broken. A stream can
therefore give out a finished character at once; valid text is equal.
"""

import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer

from llmbox.engine.errors import ModelError

from .tokenizer_safety import MOST_GROWTH, MOST_STEPS, replaced_growth

Step = Callable[[str, bool], str]
"""Decoder step: (token text, is it the first of the text) -> its new text. Steps run before texts become
bytes.
"""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
BYTE_ALPHABET = {byte: char for char, byte in _BYTES.items()}
"""Printable stand-ins of byte-level tokens, by bytes."""


class TokenBytes(dict[int, bytes]):
    """Bytes of tokens inside a text, by id, each computed when it is first asked for. Empty for ids that the
    tokenizer does not know (padding of the vocabulary).

    `strip` is (character, most of them) dropped where a text begins.
    """

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self._steps: list[Step] = []
        self._byte_level = self._byte_fallback = False
        self.strip = ("", 0)
        self.special_ids = frozenset(
            id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        steps = _flatten(decoder)
        if len(steps) > MOST_STEPS or replaced_growth(steps) > MOST_GROWTH:
            raise ModelError("tokenizer.json: its decoder makes tokens many times longer than they are")
        for step in steps:
            self._add(step)

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = data = self.compute(token_id)
        return data

    def is_known(self, token_id: int) -> bool:
        return self._tokenizer.id_to_token(token_id) is not None

    def compute(self, token_id: int, *, first: bool = False) -> bytes:
        """Compute a token's bytes without keeping them. `first`: of a token that begins a text."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        for step in self._steps:
            token = step(token, first)
        if self._byte_level and all(char in _BYTES for char in token):
            return bytes(_BYTES[char] for char in token)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()

    def _add(self, step: dict[str, Any]) -> None:
        match step["type"]:
            case "ByteLevel":
                self._byte_level = True
            case "ByteFallback":
                self._byte_fallback = True
            case "Fuse":
                pass
            case "Replace" if "String" in step["pattern"]:
                self._steps.append(_replace(step["pattern"]["String"], step["content"]))
            case "Strip" if step["stop"] == 0:
                self.strip = (step["content"], step["start"])
            case "Metaspace":
                self._steps.append(_metaspace(step))
            case "WordPiece":
                self._steps.append(_word_piece(step["prefix"], cleanup=step["cleanup"]))
            case "Join":
                self._steps.append(lambda token, first: token if first else " " + token)
            case other:
                raise ModelError(
                    f"tokenizer.json: its decoder {other!r} is not supported; supported are ByteLevel, "
                    "ByteFallback, Metaspace, WordPiece, Replace, Strip and Fuse"
                )


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return [{"type": "Join"}]
    if decoder["type"] == "Sequence":
        return [inner for step in decoder["decoders"] for inner in _flatten(step)]
    return [decoder]


def _replace(pattern: str, content: str) -> Step:
    return lambda token, _first: token.replace(pattern, content)


def _metaspace(step: dict[str, Any]) -> Step:
    mark = step["replacement"]
    prepends = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
    return lambda token, first: token.replace(mark, "" if first and prepends else " ")


_CLEANUPS = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
    (" 'm", "'m"), (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


def _word_piece(prefix: str, *, cleanup: bool) -> Step:
    def step(token: str, first: bool) -> str:
        if not first:
            token = token.removeprefix(prefix) if token.startswith(prefix) else " " + token
        if cleanup:
            for before, after in _CLEANUPS:
                token = token.replace(before, after)
        return token

    return step


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
        data = self._tokens[token_id]
        if self._first and self._tokens.is_known(token_id):
            data = self._tokens.compute(token_id, first=True)
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
