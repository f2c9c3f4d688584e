"""What one request asks of the sampler. Plain data: crosses the process boundary as it is."""

from dataclasses import dataclass, field
from typing import Literal

Pooling = Literal["last", "mean", "cls"]
"""Which rows of a text its vector is the mean of: the last, all, or the first."""


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
    """Token sequences whose last token is forbidden right after the tokens before it."""
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: str | None = None
    """What the answer must follow, in llguidance's JSON; `app/text/grammars.py` makes it."""
    thinking: str = "no"
    """Where thoughts may precede what follows the grammar: `may`, or `inside` where they have begun."""
    min_tokens: int = 0
    """Stop tokens are forbidden until this many tokens have been produced."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the sequence, end-of-sequence ids included unless the request ignores them."""
    logprobs: int | None = None
    """How many alternatives to report beside the chosen token; None reports nothing."""
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    """Draw no token: a vector of the prompt is wanted. Then `max_tokens` is 0."""

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
