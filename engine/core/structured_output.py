"""Structured output: bit masks of the tokens that a grammar allows next.

The mask depends on the answer's tokens alone: a request that was preempted, or is resumed by another engine,
replays its tokens and continues as before. The daemon has checked each grammar in a sandbox process
(`app/sandbox/grammar_worker.py`). Here it is compiled over the model's tokens, which takes milliseconds.
llguidance is imported with the first grammar.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, Literal

from ..errors import GrammarError
from ..ipc.messages import Vocabulary
from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

THINK, THOUGHT = b"<think>", b"</think>"
_BREAKS = (b"\n", b"\n\n")
_SLICES: Final = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]+']
"""llguidance slices: tokens of these kinds are checked together inside JSON strings. The masks are the same
and take a quarter of the time."""
_KEPT: Final = 32
"""Number of compiled grammars to cache: clients send the same ones again and again."""
_Place = Literal["start", "thoughts", "gap", "answer"]


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
        self.think = self.texts.index(THINK) if THINK in self.texts else None
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

    @cached_property
    def spilling(self) -> list[int]:
        """Ids of tokens with text after a `>`: they could end the reasoning and begin the answer in one
        token.
        """
        return [i for i, text in enumerate(self.texts) if text.partition(b">")[2].strip()]


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


class GrammarCompiler:
    """Compiler of grammars over one model's tokens, with a cache."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokens: GrammarVocabulary | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._tokens = GrammarVocabulary(vocabulary, self._vocab_size)
        self._compiled.clear()

    def constraint(self, params: SamplingParams, num_prompt: int) -> "GrammarState":
        """Return the state at the start of the request's grammar. Raises GrammarError."""
        if params.grammar is None or self._tokens is None:
            raise GrammarError("The engine has not been sent what its tokens stand for.")
        return GrammarState(self._matcher(params.grammar, self._tokens), self._tokens, params, num_prompt)

    def _matcher(self, grammar: str, tokens: GrammarVocabulary) -> "LLMatcher":
        """Return a new matcher at the start of the grammar. Raises GrammarError if it does not compile."""
        found = self._compiled.get(grammar)
        if found is None:
            from llguidance import LLMatcher  # noqa: PLC0415

            found = LLMatcher(tokens.tree, grammar, log_level=0, limits=parser_limits())
            if found.is_error():
                raise GrammarError(f"The grammar cannot be compiled: {_format_error(found)}")
            self._compiled[grammar] = found
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found.deep_copy()


class GrammarState:
    """Position of one request in its grammar.

    For a reasoning model the grammar applies to the answer after the reasoning. The reasoning must end with
    `</think>`, and one token of line breaks may follow it.
    """

    def __init__(
        self, matcher: "LLMatcher", tokens: GrammarVocabulary, params: SamplingParams, num_prompt: int
    ) -> None:
        self.problem: str | None = None
        """Reason why the grammar cannot be followed any further, or None."""
        self._matcher = matcher
        self._tokens = tokens
        self._stops = [i for i in params.stop_token_ids if 0 <= i < tokens.size]
        self._seen = num_prompt
        places: dict[str, _Place] = {"inside": "thoughts", "may": "start"}
        self._place: _Place = places.get(params.thinking, "answer")
        if self._place == "start" and tokens.think is None:
            self._place = "answer"
        self._tail = b""

    def allowed(self, token_ids: Sequence[int]) -> bytes:
        """Return the mask of ids allowed after `token_ids`, prompt included: id i is bit i % 8 of byte i //
        8. No bit is set if there is a `problem`.
        """
        for token in token_ids[self._seen :]:
            self._take(token)
        self._seen = len(token_ids)
        if self._place == "thoughts":
            return self._in_thoughts()
        mask = self._by_grammar()
        if self._place == "start" and self._tokens.think is not None:
            _set(mask, [self._tokens.think])
        elif self._place == "gap":
            _set(mask, self._tokens.breaks)
        return bytes(mask)

    def _take(self, token: int) -> None:
        place, self._place = self._place, "answer"
        if place == "thoughts":
            self._tail = (self._tail + self._tokens.texts[token])[-64:]
            self._place = "gap" if THOUGHT in self._tail else "thoughts"
        elif place == "start" and token == self._tokens.think:
            self._place = "thoughts"
        elif (
            not (place == "gap" and token in self._tokens.breaks)
            and self.problem is None
            and not self._matcher.consume_token(token)
        ):
            self.problem = f"The answer does not follow its grammar: {_format_error(self._matcher)}"

    def _in_thoughts(self) -> bytes:
        mask = bytearray(b"\xff" * _bytes_of(self._tokens.size))
        _clear_after(mask, self._tokens.size)
        _clear(mask, self._stops)
        if b"</" in self._tail[-len(THOUGHT) :]:
            _clear(mask, self._tokens.spilling)
        return bytes(mask)

    def _by_grammar(self) -> bytearray:
        mask = bytearray(_bytes_of(self._tokens.size))
        if self.problem is not None:
            return mask
        found = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            error = _format_error(self._matcher)
            self.problem = (
                "No text can follow the grammar: a '$ref' that leads only back to itself describes nothing."
                if error.startswith("NoExtensionBias")
                else f"The grammar is too complex to follow: {error}"
            )
            return mask
        mask[:] = found[: len(mask)]
        _clear_after(mask, self._tokens.size)
        end = self._tokens.end
        if found[end // 8] >> end % 8 & 1:
            _set(mask, self._stops)
        return mask


def _format_error(matcher: "LLMatcher") -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())


def _bytes_of(bits: int) -> int:
    return -(-bits // 8)


def _set(mask: bytearray, ids: Sequence[int]) -> None:
    for i in ids:
        mask[i // 8] |= 1 << i % 8


def _clear(mask: bytearray, ids: Sequence[int]) -> None:
    for i in ids:
        mask[i // 8] &= ~(1 << i % 8)


def _clear_after(mask: bytearray, bits: int) -> None:
    if bits % 8:
        mask[-1] &= (1 << bits % 8) - 1
