"""Structured output: bit masks of the tokens that a grammar allows next.

The mask depends on the answer's tokens alone: a request that was preempted, or is resumed by another engine,
replays its tokens and continues as before. The daemon has checked each grammar in a sandbox process
(`app/sandbox/grammar_worker.py`). Here it is compiled over the model's tokens, which takes milliseconds.
llguidance is imported with the first grammar.
"""

import copy
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from ...ipc.messages import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_BREAKS = (b"\n", b"\n\n")
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

    def fork(self) -> "GrammarState":
        """Return a copy that goes on by itself."""
        forked = copy.copy(self)
        forked._matcher = self._matcher.deep_copy()  # noqa: SLF001 - its own
        return forked

    def take(self, token: int) -> None:
        if self.problem is None and not self._matcher.consume_token(token):
            self.problem = f"The answer does not follow its grammar: {format_error(self._matcher)}"

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


def format_error(matcher: "LLMatcher") -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())


def bytes_of(bits: int) -> int:
    return -(-bits // 8)


def set_bits(mask: bytearray, ids: Sequence[int]) -> None:
    for i in ids:
        mask[i // 8] |= 1 << i % 8


def clear(mask: bytearray, ids: Sequence[int]) -> None:
    for i in ids:
        mask[i // 8] &= ~(1 << i % 8)


def clear_after(mask: bytearray, bits: int) -> None:
    if bits % 8:
        mask[-1] &= (1 << bits % 8) - 1
