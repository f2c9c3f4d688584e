"""Structured output: bit masks of the tokens that a grammar allows next.

The mask depends on the answer's tokens alone: a request that was preempted, or is resumed by another engine,
replays its tokens and continues as before. The daemon has checked each grammar in a sandbox process
(`app/sandbox/grammar_worker.py`). Here it is compiled over the model's tokens, which takes milliseconds.
llguidance is imported with the first grammar.
"""

import copy
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from ...errors import GrammarError
from ...ipc.messages import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_BREAKS = (b"\n", b"\n\n")
_WHITE_SPACE: Final = b" \t\r\n"
_REMEMBERED: Final = 512
"""Bytes before a guess whose white space it imitates."""
_BYTES_OF_TOKEN: Final = 4
"""Bytes of text to guess for each token."""
_MOST_MASKS: Final = 8
"""Masks that a guess may take: each costs as much as that of a token."""
_SPECIAL: Final = re.compile(rb"\xff\[(\d+)\]")
"""Special token in the text that a grammar fixes."""
_SLICES: Final = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]+']
"""llguidance slices: tokens of these kinds are checked together inside JSON strings. The masks are the same
and take a quarter of the time."""


def parser_limits() -> "LLParserLimits":
    """Return limits of one grammar: about 20 ms to compile, as much per token, 20 MB of memory."""
    from llguidance import LLParserLimits  # noqa: PLC0415

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=10_000,
        max_grammar_size=100_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


class GrammarVocabulary:
    """Token texts of the model, and llguidance's trie of them. Building `tree` takes tenths of a second."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        places = pairwise(accumulate(vocabulary.sizes[:vocab_size], initial=0))
        texts = [vocabulary.data[start:end] for start, end in places]
        self.texts = texts + [b""] * (vocab_size - len(texts))
        self.special = [i for i in vocabulary.special if i < vocab_size]
        self._spilling: dict[bytes, list[int]] = {}
        self.breaks = [i for i, text in enumerate(self.texts) if text in _BREAKS]

    @property
    def size(self) -> int:
        return len(self.texts)

    @property
    def end(self) -> int:
        """Id that stands for the end of an answer in grammars; the model has no such id."""
        return len(self.texts)

    @cached_property
    def tree(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415

        return LLTokenizer(TokenizerWrapper(_Source(self)), slices=_SLICES)

    def id_of(self, text: str) -> int | None:
        """Return the token that is this text, None if there is none."""
        return self._ids.get(text.encode())

    def spilling_over(self, mark: str, said: bytes, *, blank: bool = True) -> list[int]:
        """Return ids of tokens with text after the end of a mark of which `said` holds a beginning. `blank`:
        also those with white space alone.
        """
        data = mark.encode()
        sizes = [size for size in range(min(len(data) - 1, len(said)), 0, -1) if said.endswith(data[:size])]
        found = [(i, len(data) - size) for size in sizes for i in self._beyond(data[size:])]
        return [i for i, size in found if blank or self.texts[i][size:].strip()]

    def _beyond(self, rest: bytes) -> list[int]:
        """Return ids of tokens that begin with `rest` and go on."""
        found = self._spilling.get(rest)
        if found is None:
            size = len(rest)
            found = [i for i, text in enumerate(self.texts) if len(text) > size and text.startswith(rest)]
            self._spilling[rest] = found
        return found

    def split(self, text: bytes) -> list[int]:
        """Return tokens of a text, the longest first; those before the first byte that no token has. Special
        tokens are written as llguidance does.
        """
        ids, place = list[int](), 0
        while place < len(text):
            if special := _SPECIAL.match(text, place):
                ids.append(int(special[1]))
                place = special.end()
                continue
            parts = (text[place:end] for end in range(min(len(text), place + self._longest), place, -1))
            piece = next((part for part in parts if part in self._pieces), None)
            if piece is None:
                break
            ids.append(self._pieces[piece])
            place += len(piece)
        return ids

    @cached_property
    def letters(self) -> int:
        """Bits of the tokens that are one byte, without white space."""
        ids = (self._pieces.get(bytes([byte])) for byte in range(256) if byte not in _WHITE_SPACE)
        return _bits(i for i in ids if i is not None)

    @cached_property
    def marks(self) -> int:
        """Bits of special tokens."""
        return _bits(self.special)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._pieces))

    @cached_property
    def _pieces(self) -> dict[bytes, int]:
        """Ids of texts. Of one byte the last, as SentencePiece has all bytes once more before its pieces."""
        return self._ids | {text: i for i, text in enumerate(self.texts) if len(text) == 1}

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {text: i for i, text in reversed(list(enumerate(self.texts)))}


class _Source:
    """Adapter with the attributes that llguidance's `TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, tokens: GrammarVocabulary) -> None:
        self.tokens = [*tokens.texts, b""]
        self.eos_token_id = tokens.end
        self.special_token_ids = tokens.special

    def __call__(self, _text: str) -> list[int]:
        """Return no tokens. Never called: grammars have `no_forcing`, which allows any tokenization."""
        return []


class GrammarState:
    """Position of one answer in its grammar."""

    def __init__(self, matcher: "LLMatcher", tokens: GrammarVocabulary, stops: Sequence[int]) -> None:
        self.problem: str | None = None
        """Reason why the grammar cannot be followed any further, or None."""
        self._matcher = matcher
        self._tokens = tokens
        self._stops = [i for i in stops if 0 <= i < tokens.size]
        self._end_bits = _bits([*self._stops, tokens.end])

    def fork(self) -> "GrammarState":
        """Return an independent copy."""
        forked = copy.copy(self)
        forked._matcher = self._matcher.deep_copy()  # noqa: SLF001 - its own
        return forked

    def take(self, token: int) -> None:
        if self.problem is None and not self._matcher.consume_token(token):
            self.problem = f"The answer does not follow its grammar: {format_error(self._matcher)}"

    def count_allowed(self, ids: Sequence[int]) -> int:
        """Return how many of these tokens may follow, one after another. An end of the answer is none."""
        ends = (place for place, token in enumerate(ids) if token in self._stops)
        ids = list(ids[: next(ends, len(ids))])
        return self._matcher.validate_tokens(ids) if ids and self.problem is None else 0

    def guess(self, said: bytes, mask: bytes, most: int) -> list[int]:
        """Return at most so many tokens that should come next, because the text has no choice there but
        between spaces. `said`: the text before, whose spaces are imitated. `mask`: result of `allowed`.

        A grammar allows any tokens of its text. The guess has the longest ones, as tokenizers mostly do.
        """
        if self.problem is not None:
            return []
        ahead, ids, text, masks = self._matcher.deep_copy(), list[int](), b"", 0
        while masks < _MOST_MASKS and len(ids) + len(text) // _BYTES_OF_TOKEN < most:
            piece: bytes | int = ahead.compute_ff_bytes()
            if not piece:
                known = ahead.compute_bitmask() if ids or text else mask
                piece, masks = self._only_text(ahead, known, said[-_REMEMBERED:] + text), masks + 1
            if isinstance(piece, int):
                ids, text, found = [*ids, *self._tokens.split(text), piece], b"", [piece]
            else:
                text, found = text + piece, self._tokens.split(piece)
            if not found or ahead.is_error() or ahead.try_consume_tokens(found) < len(found):
                break
        ids += self._tokens.split(text)
        return ids[: self.count_allowed(ids[:most])]

    def _only_text(self, ahead: "LLMatcher", mask: bytes, said: bytes) -> bytes | int:
        """Return the byte that must come next after some white space, with white space as before it. A token
        if it must be this one, no bytes if there is a choice.
        """
        tokens = self._tokens
        found = int.from_bytes(mask, "little")
        if found & self._end_bits:
            return b""
        if found.bit_count() == 1:
            return found.bit_length() - 1
        byte = found & tokens.letters
        if byte.bit_count() != 1 or found & tokens.marks:
            return b""
        text = tokens.texts[byte.bit_length() - 1]
        spaced = guess_space(said, text) + text
        ids = tokens.split(spaced)
        return spaced if ahead.validate_tokens(ids) == len(ids) else text

    def allowed(self) -> bytearray:
        """Return the mask of ids allowed next; no bit is set if there is a `problem`."""
        mask = bytearray(bytes_of(self._tokens.size))
        if self.problem is not None:
            return mask
        found = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            error = format_error(self._matcher)
            self.problem = (
                "No text can follow the grammar: a '$ref' that leads only back to itself describes nothing."
                if error.startswith("NoExtensionBias")
                else f"The grammar is too complex to follow: {error}"
            )
            return mask
        mask[:] = found[: len(mask)]
        clear_after(mask, self._tokens.size)
        end = self._tokens.end
        if found[end // 8] >> end % 8 & 1:
            set_bits(mask, self._stops)
        return mask


def guess_space(said: bytes, sign: bytes) -> bytes:
    """Return the white space that is still to come in JSON before a sign, by the last such place in `said`.
    Lines are indented as the last one, or a step more or less where a bracket opens or closes.
    """
    text = said.rstrip(_WHITE_SPACE)
    written, last = said[len(text) :], text[-1:]
    opens, closes = last in (b"{", b"["), sign in (b"}", b"]")
    before = rb"[{\[]" if opens else rb"\S" if closes else re.escape(last)
    after = rb"[}\]]" if closes else rb"\S" if opens else re.escape(sign)
    used = re.findall(before + rb"([ \t\r\n]*)" + after, text) if last else []
    space: bytes = used[-1] if used else b" " if last in (b",", b":") else b""
    begins = closes or last in (b"{", b"[", b",")
    if b"\n" in space or (begins and b"\n" in (written if used else text + written)):
        lines = re.findall(rb"\n([ \t]*)", text)
        step, indent = next(filter(None, lines), b""), lines[-1] if lines else b""
        indent = indent + step if opens else indent.removesuffix(step) if closes else indent
        space = space.rpartition(b"\n")[0] + b"\n" + indent
    return space.removeprefix(written) if space.startswith(written) else b""


def compile_grammar(grammar: str, tokens: GrammarVocabulary) -> "LLMatcher":
    """Return a matcher at the start of a grammar. Raises GrammarError if it does not compile."""
    from llguidance import LLMatcher  # noqa: PLC0415

    found = LLMatcher(tokens.tree, grammar, log_level=0, limits=parser_limits())
    if found.is_error():
        raise GrammarError(f"The grammar cannot be compiled: {format_error(found)}")
    return found


def format_error(matcher: "LLMatcher") -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())


def bytes_of(bits: int) -> int:
    return -(-bits // 8)


def _bits(ids: Iterable[int]) -> int:
    return sum(1 << i for i in set(ids))


def set_bits(mask: bytearray, ids: Sequence[int]) -> None:
    for i in ids:
        mask[i // 8] |= 1 << i % 8


def clear(mask: bytearray, ids: Sequence[int]) -> None:
    for i in ids:
        mask[i // 8] &= ~(1 << i % 8)


def clear_after(mask: bytearray, bits: int) -> None:
    if bits % 8:
        mask[-1] &= (1 << bits % 8) - 1
