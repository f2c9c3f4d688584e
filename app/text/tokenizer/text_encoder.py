"""Text to token ids, with or without marks around literals that must stay text (`chat_template.py`)."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

from llmbox.engine.hardware.machine import read_memory


class TokenizeError(Exception):
    """The tokenizer could not encode a text. The message is for the caller who sent it."""


@dataclass(frozen=True, slots=True)
class SpecialTokenMarkers:
    """Private-use characters that occur nowhere in the messages or the template."""

    start: str
    end: str
    tail: str

    @classmethod
    def absent_from(cls, text: str) -> "SpecialTokenMarkers":
        free = (char for char in map(chr, range(0xF0000, 0xFFFFE)) if char not in text)
        return cls(next(free), next(free), next(free))


MOST_TOKENS: Final = 1 << 20
"""Tokens of one text: encoding takes 200 bytes for each."""
_MEMORY_PER_TOKEN: Final = 2400
"""Memory of the machine for each of them: a few texts are encoded at once, in a quarter of it."""
_PIECE: Final = 1 << 18
"""Characters of a long text that are counted at once."""


class TextEncoder:
    """Encoder of one tokenizer, working in this process. Raises TokenizeError."""

    def __init__(self, tokenizer: Tokenizer, most_tokens: int | None = None) -> None:
        """Create an encoder. `most_tokens`: bound of one text; None: what the memory has room for."""
        if most_tokens is None:
            most_tokens = min(MOST_TOKENS, read_memory().total // _MEMORY_PER_TOKEN)
        self._tokenizer = tokenizer
        self._most_tokens = most_tokens
        self._plain: dict[bool, Tokenizer] = {}
        self._added = frozenset(tokenizer.get_added_tokens_decoder())

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Encode a text. `special`: with the tokens that the tokenizer adds around a text."""
        self._check_length(text)
        return _encode(self._tokenizer, text, special=special)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """Encode two texts as one, with the tokens around them. Returns the ids and the position of the
        first one with another token type; None if all have the same type.
        """
        self._check_length(first + second)
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([(first, second)])
        except BaseException as error:  # noqa: BLE001 - panics of the library become errors
            raise _as_tokenize_error(error) from None
        types: list[int] = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else None

    def encode_marked(self, rendered: str, markers: SpecialTokenMarkers) -> list[int]:
        if markers.start not in rendered and markers.end not in rendered:
            return self.encode(rendered, special=False)
        return [id_ for part in self._encode_marked(rendered, markers) for id_ in part]

    def _check_length(self, text: str) -> None:
        """Refuse a text of too many tokens, counted in pieces: as one it would take gigabytes."""
        if len(text) <= self._most_tokens // (1 if text.isascii() else 4):  # at most one token for a byte
            return
        tokens = 0
        for start in range(0, len(text), _PIECE):
            tokens += len(_encode(self._tokenizer, text[start : start + _PIECE], special=False))
            if tokens > self._most_tokens:
                raise TokenizeError(f"it has more than {self._most_tokens:,} tokens")

    def _encode_marked(self, rendered: str, markers: SpecialTokenMarkers) -> Iterator[Sequence[int]]:
        self._check_length(rendered)
        broken = rendered.replace(markers.end, "")
        # start, literal -> first character, start, rest: no longer the literal
        broken = re.sub(f"{markers.start}(.)", f"\\g<1>{markers.start}", broken, flags=re.DOTALL)
        try:
            (encoding,) = self._tokenizer.encode_batch([broken], add_special_tokens=False)
        except BaseException as error:  # noqa: BLE001 - panics of the library become errors
            raise _as_tokenize_error(error) from None
        ids = encoding.ids
        begin = first = 0
        for i in [i for i, id_ in enumerate(ids) if id_ in self._added]:
            place = encoding.token_to_chars(i)  # `offsets` would make objects for every token
            if place is None:
                raise TokenizeError("the tokenizer does not report where a token is in the text")
            start, end = place
            yield self._span(broken[begin:start], ids[first:i], markers, at_start=begin == 0)
            yield (ids[i],)
            begin, first = end, i + 1
        yield self._span(broken[begin:], ids[first:], markers, at_start=begin == 0)

    def _span(
        self, text: str, ids: Sequence[int], markers: SpecialTokenMarkers, *, at_start: bool
    ) -> Sequence[int]:
        if markers.start not in text:
            return ids
        tokenizer = self._plain_tokenizer(at_start=at_start)
        return _encode(tokenizer, text.replace(markers.start, ""), special=False)

    def _plain_tokenizer(self, *, at_start: bool) -> Tokenizer:
        """Return the tokenizer without added tokens; unless `at_start`, also without the space put before a
        text's first word.
        """
        if at_start not in self._plain:
            source = json.loads(self._tokenizer.to_str())
            source["added_tokens"] = []
            source["post_processor"] = None
            if not at_start:
                _never_prepend(source.get("pre_tokenizer"))
            self._plain[at_start] = Tokenizer.from_str(json.dumps(source))
        return self._plain[at_start]


def load_tokenizer(source: bytes) -> Tokenizer:
    """Load a tokenizer.json. Raises ValueError with the reason, also where the library panics."""
    try:
        tokenizer = Tokenizer.from_buffer(source)
    except BaseException as error:  # noqa: BLE001 - panics of the library become errors
        raise ValueError(str(_as_tokenize_error(error))) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # it is for training: a text would have other ids each time
    return tokenizer


def _encode(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """Encode a text. Unlike `Tokenizer.encode` it lets other threads run meanwhile, which the event loop
    needs.
    """
    try:
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
    except BaseException as error:  # noqa: BLE001 - panics of the library become errors
        raise _as_tokenize_error(error) from None
    return ids


def _as_tokenize_error(error: BaseException) -> BaseException:
    """Convert a panic of the library, which is not an `Exception`: pyo3 derives it from BaseException."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return TokenizeError(" ".join(str(error).split())[:300] or type(error).__name__)
    return error


def _never_prepend(pre_tokenizer: dict[str, Any] | None) -> None:
    for step in (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}]):
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
