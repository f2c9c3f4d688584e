"""Sampling parameters of one request: plain data that is sent to the engine process unchanged."""

from dataclasses import dataclass, field
from typing import Literal

Pooling = Literal["last", "mean", "cls"]
"""Pooling of hidden states into one embedding: the last token's state, the mean of all, or the first's."""


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
    thinking: str = "no"
    """Reasoning before the constrained answer: `no`, `may` (the model may begin with it) or `inside` (the
    prompt has begun it)."""
    min_tokens: int = 0
    """Number of output tokens before which stop tokens are banned."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the sequence; they include the end-of-sequence ids unless the request ignores them."""
    logprobs: int | None = None
    """Number of alternatives to report beside the sampled token; None reports no log-probabilities."""
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    """Return an embedding of the prompt instead of sampling tokens. Then `max_tokens` is 0."""

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
