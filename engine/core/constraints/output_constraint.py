"""Output constraint: which tokens a request may draw next, from its reasoning to the end of its grammar.

    start -> thoughts -> gap -> answer

Thoughts end at their budget, or when they repeat themselves for ever: then their end is forced. A grammar
holds for the answer after them, from its first token or from a trigger on. Everything is a function of the
request's own tokens, so a request that was preempted, or is resumed by another engine, continues as before.
"""

import copy
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from ...errors import GrammarError
from ...ipc.messages import Vocabulary
from ...sampling_params import SamplingParams, ThinkingParams
from .structured_output import (
    GrammarState,
    GrammarVocabulary,
    bytes_of,
    clear,
    clear_after,
    compile_grammar,
    set_bits,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

_Place = Literal["start", "thoughts", "gap", "answer"]
_MOST_COMPILED: Final = 32
"""Number of compiled grammars to cache: clients send the same ones again and again."""
_TOKENS_BEFORE: Final = 128
"""Last tokens whose white space a guess imitates."""
_OPENER_WITHIN: Final = 4
"""Tokens of an answer among which reasoning may begin."""
LOOP_STRIDE: Final = 16
"""Thoughts are searched for loops each time they have grown by so many tokens."""
LOOP_TOKENS: Final = 224
"""Tokens of repetition that are a loop: with the stride and the forced end fewer than 256 are lost."""
LOOP_REPEATS: Final = 4
LONGEST_PERIOD: Final = 256
"""Longest line that is recognized when it is repeated, in tokens."""


class ThoughtTracker:
    """Position of an answer in its reasoning. `texts`: of all tokens; None where ids show the marks."""

    def __init__(
        self, params: ThinkingParams, texts: Sequence[bytes] | None, *, is_strict: bool = False
    ) -> None:
        """`is_strict`: reasoning begins with one token, or not at all."""
        self.params = params
        self._is_strict = is_strict
        self.place: _Place = "thoughts" if params.begins == "inside" else "start"
        if params.begins == "no":
            self.place = "answer"
        self.count = 0
        """Number of tokens inside thoughts."""
        self.tail = b""
        """End of the text of the thoughts."""
        self._texts = texts
        self._opener, self._closer = params.opener.encode(), params.closer.encode()
        self._seen = 0
        self._ids: deque[int] = deque(maxlen=LOOP_REPEATS * LONGEST_PERIOD)
        self._last: deque[int] = deque(maxlen=max(len(params.opener_ids), len(params.closer_ids), 1))
        self.forced_ids: list[int] = []
        """Ids that must come next, in order."""
        self._force()

    def fork(self) -> "ThoughtTracker":
        """Return an independent copy."""
        forked = copy.copy(self)
        for name in ("_ids", "_last", "forced_ids"):
            setattr(forked, name, getattr(self, name).copy())
        return forked

    def take(self, token: int) -> None:
        """Follow one token of the answer."""
        self._seen += 1
        if self.forced_ids:
            self.forced_ids.pop(0)
        self._last.append(token)
        if self._texts is not None:
            self.tail = (self.tail + self._texts[token])[-64:]
        match self.place:
            case "start" | "answer" if self._begins():
                self.place, self.tail = "thoughts", b""
                self._last.clear()
            case "start" if self._is_answer():
                self.place = "answer"
            case "thoughts":
                self._think(token)
            case "gap":
                self.place = "answer"
        self._force()

    def _force(self) -> None:
        if self.place == "thoughts" and not self.forced_ids and self._must_end():
            self.forced_ids = list(self.params.end_ids)

    def may_force(self, unknown: int) -> bool:
        """Return True if the end of the thoughts may be forced once `unknown` more tokens are there: then all
        of them must be known.
        """
        if self.forced_ids:
            return True
        if self.place == "answer" and not self.params.anywhere:
            return False
        budget, count = self.params.budget, self.count + unknown
        if budget is not None and count >= budget:
            return True
        due = count >= LOOP_TOKENS and count // LOOP_STRIDE != self.count // LOOP_STRIDE
        return self.params.stop_loops and due

    def _think(self, token: int) -> None:
        if self._ends_with(self.params.closer_ids, self._closer):
            self.place = "gap"
            self._ids.clear()
            return
        self.count += 1
        self._ids.append(token)

    def _begins(self) -> bool:
        """Return True if the last token ends the mark that begins reasoning."""
        expected = self.place == "start" or self.params.anywhere
        return expected and self._ends_with(self.params.opener_ids, self._opener)

    def _is_answer(self) -> bool:
        """Return True if what was said so far is no beginning of reasoning."""
        if self._texts is None:
            return self._seen >= _OPENER_WITHIN and not self.params.anywhere
        return self._is_strict or not self._opener.startswith(self.tail.lstrip())

    def _ends_with(self, ids: tuple[int, ...], mark: bytes) -> bool:
        if self._texts is None:
            return bool(ids) and tuple(self._last)[-len(ids) :] == ids
        return mark in self.tail if self.place == "thoughts" else self.tail.strip().endswith(mark)

    def _must_end(self) -> bool:
        budget = self.params.budget
        if budget is not None and self.count >= budget:
            return True
        due = self.count >= LOOP_TOKENS and self.count % LOOP_STRIDE == 0
        return self.params.stop_loops and due and is_loop(list(self._ids))


def is_loop(ids: list[int]) -> bool:
    """Return True if the last tokens repeat one sequence, for at least `LOOP_TOKENS` tokens and
    `LOOP_REPEATS` times.
    """
    back = ids[::-1]
    most = min(len(ids) // LOOP_REPEATS, LONGEST_PERIOD)
    period = 0
    while True:
        try:
            period = back.index(back[0], period + 1, most + 1)
        except ValueError:
            return False
        if back[period : period + 8] != back[:8]:
            continue
        span = max(LOOP_TOKENS, LOOP_REPEATS * period)
        if span <= len(ids) and back[period:span] == back[: span - period]:
            return True


class OutputConstraint:
    """Constraint of one request: its reasoning budget, its grammar, or both."""

    def __init__(
        self,
        params: SamplingParams,
        num_prompt: int,
        vocab_size: int,
        tokens: GrammarVocabulary | None,
        grammar: GrammarState | None,
    ) -> None:
        thinking = params.thinking
        self._thoughts: ThoughtTracker | None = None
        if thinking is not None and (thinking.begins != "no" or thinking.anywhere):
            if not all(0 <= i < vocab_size for i in thinking.end_ids):
                thinking = replace(thinking, budget=None, stop_loops=False)
            texts = None if tokens is None or not params.needs_vocabulary else tokens.texts
            is_strict = grammar is not None and not any(params.triggers)
            self._thoughts = ThoughtTracker(thinking, texts, is_strict=is_strict)
        self._beside = thinking is not None and thinking.in_grammar
        """The grammar describes the thoughts too."""
        self._grammar = grammar
        self._is_optional = bool(params.triggers)
        """The answer goes on without the grammar where that cannot be followed."""
        self._tokens = tokens
        self._by_trigger = any(params.triggers)
        self._triggers = list(params.triggers) if self._by_trigger else []
        self._spoken = b""
        """End of the text before a trigger."""
        self._stops = [i for i in params.stop_token_ids if 0 <= i < vocab_size]
        self._vocab_size = vocab_size
        self._seen = self._num_prompt = num_prompt
        self._known: tuple[bytes | None] | None = None
        """Mask after the tokens seen, where it was asked for."""

    @property
    def problem(self) -> str | None:
        """Reason why the grammar cannot be followed any further, or None."""
        return None if self._grammar is None else self._grammar.problem

    @property
    def has_grammar(self) -> bool:
        return self._grammar is not None

    def needs_all_tokens(self, token_ids: Sequence[int], pending: int) -> bool:
        """Return True if all tokens must be known before the next one is drawn. `pending`: those that are
        not.
        """
        if self._grammar is not None:
            return True
        self._follow(token_ids)
        return self._thoughts is not None and self._thoughts.may_force(pending)

    def allowed(self, token_ids: Sequence[int]) -> bytes | None:
        """Return the mask of ids allowed after `token_ids`, prompt included: id i is bit i % 8 of byte i //
        8. None: all are. No bit is set if there is a `problem`.
        """
        self._follow(token_ids)
        if self._known is None:
            self._known = (self._mask(),)
        return self._known[0]

    def _mask(self) -> bytes | None:
        thoughts, grammar = self._thoughts, self._grammar
        if thoughts is not None and thoughts.forced_ids:
            mask = bytearray(bytes_of(self._vocab_size))
            set_bits(mask, thoughts.forced_ids[:1])
            return bytes(mask)
        if grammar is None:
            return None
        if self._triggers:
            return self._before_trigger()
        if thoughts is not None and not self._beside and not self._by_trigger:
            assert self._tokens is not None
            if thoughts.place == "thoughts":
                return self._in_thoughts(thoughts)
            mask = grammar.allowed()
            opener = self._tokens.id_of(thoughts.params.opener)
            if thoughts.place == "start" and opener is not None:
                set_bits(mask, [opener])
            elif thoughts.place == "gap":
                set_bits(mask, self._tokens.breaks)
            return bytes(mask)
        mask = grammar.allowed()
        if self._is_optional and grammar.problem is not None:
            self._grammar = None
            return None
        return bytes(mask)

    def allowed_after(
        self, token_ids: Sequence[int], mask: bytes | None, drafts: Sequence[int]
    ) -> list[bytes | None]:
        """Return what is allowed after each of the drafts, up to the first that is not allowed itself or ends
        the answer. `mask`: what is allowed after `token_ids`.
        """
        ahead, tokens, masks = self.fork(), list(token_ids), list[bytes | None]()
        for draft in drafts:
            if draft in self._stops or (mask is not None and not mask[draft // 8] >> draft % 8 & 1):
                break
            tokens.append(draft)
            mask = ahead.allowed(tokens)
            masks.append(mask)
        return masks

    def count_allowed(self, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """Return how many of the drafts the grammar may allow after `token_ids`."""
        grammar = self._governing(token_ids)
        return len(drafts) if grammar is None else grammar.count_allowed(drafts)

    def guess(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Return at most so many tokens that should follow, because the grammar or the end of thoughts leaves
        no choice.
        """
        mask, grammar = self.allowed(token_ids), self._governing(token_ids)
        if grammar is None or mask is None or self._tokens is None:
            return [] if self._thoughts is None else self._thoughts.forced_ids[:most]
        said = token_ids[max(self._num_prompt, len(token_ids) - _TOKENS_BEFORE) :]
        return grammar.guess(b"".join(self._tokens.texts[token] for token in said), mask, most)

    def _governing(self, token_ids: Sequence[int]) -> GrammarState | None:
        """Return the grammar where it alone decides what may follow `token_ids`, else None."""
        self._follow(token_ids)
        thoughts = self._thoughts
        if self._triggers or (thoughts is not None and thoughts.forced_ids):
            return None
        is_free = thoughts is None or self._beside or self._by_trigger or thoughts.place == "answer"
        return self._grammar if is_free else None

    def fork(self) -> "OutputConstraint":
        """Return an independent copy."""
        forked = copy.copy(self)
        forked._thoughts = None if self._thoughts is None else self._thoughts.fork()  # noqa: SLF001 - its own
        forked._grammar = None if self._grammar is None else self._grammar.fork()  # noqa: SLF001
        return forked

    def _follow(self, token_ids: Sequence[int]) -> None:
        if self._seen == len(token_ids):
            return
        self._known = None
        for token in token_ids[self._seen :]:
            self._take(token)
        self._seen = len(token_ids)

    def _take(self, token: int) -> None:
        thoughts, grammar = self._thoughts, self._grammar
        before = "answer"
        if thoughts is not None:
            before = thoughts.place
            thoughts.take(token)
        if grammar is None:
            return
        if self._triggers:
            self._look_for_trigger(token, in_thoughts=before == "thoughts")
            return
        if not self._beside and not self._by_trigger and thoughts is not None:
            assert self._tokens is not None
            is_break = before == "gap" and token in self._tokens.breaks
            if is_break or before == "thoughts" or thoughts.place == "thoughts":
                return
        grammar.take(token)

    # ------------------------------------------------------------------ triggers

    def _look_for_trigger(self, token: int, *, in_thoughts: bool) -> None:
        assert self._tokens is not None
        if in_thoughts and not self._ends_thoughts():
            self._spoken = b""
            return
        self._spoken = (self._spoken + self._tokens.texts[token])[-256:]
        if any(self._spoken.endswith(trigger.encode()) for trigger in self._triggers):
            self._triggers = []

    def _ends_thoughts(self) -> bool:
        thoughts = self._thoughts
        return thoughts is None or thoughts.params.ended_by_calls

    def _before_trigger(self) -> bytes | None:
        """Keep tokens out that would end a trigger and go on after it: the grammar begins right there."""
        assert self._tokens is not None
        tokens, said = self._tokens, self._spoken
        spilling = [i for each in self._triggers for i in tokens.spilling_over(each, said)]
        if not spilling:
            return None
        mask = bytearray(b"\xff" * bytes_of(self._vocab_size))
        clear_after(mask, self._vocab_size)
        clear(mask, spilling)
        return bytes(mask)

    def _in_thoughts(self, thoughts: ThoughtTracker) -> bytes:
        assert self._tokens is not None
        mask = bytearray(b"\xff" * bytes_of(self._vocab_size))
        clear_after(mask, self._vocab_size)
        clear(mask, self._stops)
        clear(mask, self._tokens.spilling_over(thoughts.params.closer, thoughts.tail, blank=False))
        return bytes(mask)


class GrammarCompiler:
    """Compiler of grammars over one model's tokens, with a cache."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokens: GrammarVocabulary | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._tokens = GrammarVocabulary(vocabulary, self._vocab_size)
        self._compiled.clear()

    def constraint(self, params: SamplingParams, num_prompt: int) -> OutputConstraint | None:
        """Return the constraint of a request, None if it has none. Raises GrammarError."""
        grammar: GrammarState | None = None
        if params.needs_vocabulary and self._tokens is None:
            raise GrammarError("The engine has not received the vocabulary.")
        if params.grammar is not None:
            assert self._tokens is not None
            matcher = self._matcher(params.grammar, self._tokens)
            grammar = GrammarState(matcher, self._tokens, params.stop_token_ids)
        elif params.thinking is None:
            return None
        return OutputConstraint(params, num_prompt, self._vocab_size, self._tokens, grammar)

    def _matcher(self, grammar: str, tokens: GrammarVocabulary) -> "LLMatcher":
        """Return a new matcher at the start of the grammar. Raises GrammarError if it does not compile."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = compile_grammar(grammar, tokens)
            if len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found.deep_copy()
