"""What an HTTP dialect asks of the gateway, and what it gets back: no dialect's words, no engine's either."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from llmbox.engine.ipc.messages import TokenLogprobs
from llmbox.engine.sampling_params import SamplingParams

from ..engines.loaded_model import LoadedModel
from ..engines.reservation import QueueReservation
from ..security.rate_limit import Meter


@dataclass(frozen=True, slots=True)
class ContentRetention:
    """The caller lets prompt and answer be kept."""

    owner: str
    """Id of its key; empty for a caller without one."""
    body: str
    """The request's JSON as it was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A checked request. Choices come prompt-major: `n` of the first prompt, then of the second."""

    id: str
    endpoint: str
    model: LoadedModel
    prompts: list[list[int]]
    params: SamplingParams
    """For one choice; `max_tokens` and `seed` are set for each (`max_tokens` here is not read). With
    `pooling` each prompt gives a vector instead."""
    max_tokens: int | None = None
    """None: what the context leaves. 0: only the prompt's own log-probabilities are wanted."""
    max_tokens_clamped: bool = False
    """`max_tokens` may be more than the context leaves: the answer then ends where the context does."""
    n: int = 1
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    """The stop string or token that ends an answer is part of it."""
    begins: bool = True
    """The answer is a text of its own; otherwise it goes on where the prompt ends."""
    skip_special: bool = True
    seed_drawn: bool = False
    priority: int = 0
    """Lower is served first; below 0 is premium."""
    tenant: str = ""
    """Whose share of the engine it takes: see `Identity.tenant`."""
    cache_salt: str = ""
    key: str = ""
    """Name of the caller's key."""
    meter: Meter | None = None
    allowed: Callable[[], bool] | None = None
    """Whether the caller's credentials still hold; None for one that needed none."""
    client: str = ""
    keep: ContentRetention | None = None
    """None: nothing of what is asked and answered is kept."""
    stream: bool = False
    reservation: QueueReservation | None = None
    """Places in the model's queue, held since before the prompts were made; given up on submission."""
    finish_by: float | None = None
    """`time.monotonic()` at which the answer ends, whatever there is of it."""
    first_token_by: float | None = None
    """`time.monotonic()` at which a request without a token fails."""
    remarks: list[str] = field(default_factory=list)
    """Filled while it runs: warnings about how it ended."""
    prompt_param: str = "messages"
    """Name of the field that a too long prompt is blamed on."""
    max_tokens_param: str = "max_tokens"


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token of the answer with its log-probabilities; `start` is its place in the text, in characters."""

    start: int
    data: bytes
    logprobs: TokenLogprobs


@dataclass(slots=True)
class Delta:
    """What one step added to one choice. Log-probabilities come with the text that they belong to."""

    index: int
    text: str
    token_ids: list[int]
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With a choice's first delta, where asked for."""
    vector: bytes | None = None
    """Of a prompt, where `SamplingParams.pooling` asks for it: little-endian float32, of any length."""


@dataclass(slots=True)
class TokenUsage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    looked_up_tokens: int = 0
    """Of the prompt, in the prefix cache."""
    output_tokens: int = 0


def sequence_id(request_id: str, number: int) -> str:
    return f"{request_id}.{number}"


def request_of(sequence: str) -> str:
    """The request that it belongs to."""
    return sequence.rpartition(".")[0] or sequence


_MASK = (1 << 64) - 1


def draw_seed() -> int:
    """Below 2^53, so that every JSON reader gives it back unchanged."""
    return secrets.randbits(53)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of an `n > 1` request, as a signed 64-bit integer.

    Choice 0 has the request's own seed, so that n = 1 is the same answer. The others are splitmix64's
    outputs: sending one of them as `seed` with n = 1 gives that choice again. The same for every prompt
    of a list.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - (1 << 64) if z >= 1 << 63 else z
