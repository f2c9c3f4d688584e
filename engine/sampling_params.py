"""Sampling parameters of one request: plain data that is sent to the engine process unchanged."""

from dataclasses import dataclass, field
from typing import Literal

Pooling = Literal["last", "mean", "cls", "embed", "classify"]
"""Pooling of hidden states into one embedding: the last token's state, the mean of all, or the first's. Of
encoders `embed`, as their folder declares it, or `classify`, the logits of their labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingParams:
    """Reasoning of one answer: how it begins and ends, and what ends it by force."""

    begins: str = "may"
    """`no`, `may` (the answer may begin with it) or `inside` (the prompt has begun it)."""
    opener: str = "<think>"
    closer: str = "</think>"
    opener_ids: tuple[int, ...] = ()
    closer_ids: tuple[int, ...] = ()
    """Tokens of the marks. Without them the marks are looked for in the text."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end the reasoning by force."""
    budget: int | None = None
    """Number of reasoning tokens after which it is ended; None: any."""
    stop_loops: bool = False
    """End it when it repeats itself for ever."""
    anywhere: bool = False
    """Reasoning may also follow text."""
    in_grammar: bool = False
    """The grammar describes the reasoning too."""
    ended_by_calls: bool = False
    """A trigger ends the reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one output sequence, already resolved and range-checked by the daemon.

    `seed` is always explicit: noise is a function of (seed, position) only, so a request that is resumed
    or batched differently draws the same tokens. Temperature 0 is greedy.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear: the last token is banned right after the tokens before it."""
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: str | None = None
    """Grammar of the answer in llguidance's JSON, made by `app/text/grammar/grammars.py`."""
    triggers: tuple[str, ...] = ()
    """Texts of which the first to be written switches the grammar on, right after it; an empty one: at the
    answer's first token. With any, an answer that the grammar fails goes on without it."""
    thinking: ThinkingParams | None = None
    """Reasoning before the answer, where something depends on it: a grammar, a budget, a search for loops."""
    min_tokens: int = 0
    """Number of output tokens before which stop tokens are banned."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the sequence; they include the end-of-sequence ids unless the request ignores them."""
    logprobs: int | None = None
    """Number of alternatives to report beside the sampled token; None reports no log-probabilities."""
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    """Return an embedding of the prompt instead of sampling tokens. Then `max_tokens` is 0."""
    pair_start: int | None = None
    """Position of the first token of the second text, for encoders that tell the texts of a pair apart."""
    task: int | None = None
    """Index of the task whose adapter an encoder applies; None: none."""

    @property
    def needs_vocabulary(self) -> bool:
        """True if the engine must know the texts of its tokens."""
        return self.grammar is not None or (self.thinking is not None and not self.thinking.closer_ids)

    @property
    def edits_logits(self) -> bool:
        """True if a logits processor other than a mask is used."""
        return bool(
            self.penalizes
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids is not None
            or (self.min_tokens and self.stop_token_ids)
        )

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
