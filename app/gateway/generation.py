"""Types that HTTP dialects exchange with the gateway, and time limits. They use no dialect's names and none
of the engine's.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Final

import msgspec

from llmbox.engine.ipc.messages import PreparedImage, TokenLogprobs
from llmbox.engine.sampling_params import SamplingParams

from ..engines.admission import QueueReservation
from ..engines.loaded_model import LoadedModel
from ..errors import ApiError
from ..images.reader import ImageLease
from ..lifecycle.drain import Drain
from ..security.rate_limit import KeyLimiter
from ..text.stop_strings import CallMark
from .request_times import ExchangeClock


@dataclass(frozen=True, slots=True)
class ContentRetention:
    """Permission of the caller to keep prompt and answer."""

    owner: str
    """Id of the caller's key; empty for a caller without one."""
    body: str
    """JSON body of the request as it was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Checked request. Choices are prompt-major: `n` of the first prompt, then of the second."""

    id: str
    endpoint: str
    model: LoadedModel
    prompts: list[list[int]]
    images: list[PreparedImage] = field(default_factory=list)
    """Images of the only prompt."""
    params: SamplingParams
    """Sampling parameters of one choice. `max_tokens` and `seed` are set for each (`max_tokens` here is not
    read). With `pooling` each prompt gives a vector instead.
    """
    max_tokens: int | None = None
    """Limit of output tokens. None: all that the context leaves. 0: only the prompt's log-probabilities are
    wanted.
    """
    max_tokens_clamped: bool = False
    """`max_tokens` may exceed what the context leaves: the answer then ends where the context does."""
    n: int = 1
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    """Keep the stop string or token that ends an answer in its text."""
    call_mark: CallMark | None = None
    """Mark between the calls of an answer that ends where it repeats them for ever."""
    starts_new_text: bool = True
    """True if the answer starts a new text; otherwise it continues the prompt."""
    skip_special: bool = True
    priority: int = 0
    """Scheduling priority. Lower is served first; below 0 is premium."""
    tenant: str = ""
    """Tenant whose share of the engine it uses: see `Identity.tenant`."""
    cache_salt: str = ""
    key: str = ""
    """Name of the caller's key."""
    meter: KeyLimiter | None = None
    still_authorized: Callable[[], bool] | None = None
    """Check whether the caller's credentials are still valid. None for a caller that needed none."""
    client: str = ""
    keep: ContentRetention | None = None
    """Retention of prompt and answer. None: neither is kept."""
    stream: bool = False
    reservation: QueueReservation | None = None
    """Places in the model's queue, reserved before the prompts were tokenized. Released on submission."""
    image_lease: ImageLease | None = None
    """Memory of its images, counted from their decoding until it is answered."""
    finish_by: float | None = None
    """Deadline in `time.monotonic()` seconds: the answer ends there, complete or not."""
    first_token_by: float | None = None
    """Deadline in `time.monotonic()` seconds: a request without a token fails."""
    remarks: list[str] = field(default_factory=list)
    """Warnings about how the request ended, filled while it runs."""
    prompt_param: str = "messages"
    """Name of the field that an error about a too long prompt refers to."""
    pair_starts: list[int | None] | None = None
    """`SamplingParams.pair_start` of each prompt, if they are pairs of texts."""
    max_tokens_param: str = "max_tokens"
    clock: ExchangeClock = field(default_factory=ExchangeClock)
    """Moments of its HTTP exchange."""
    drain: Drain | None = None
    """Drain of the daemon: once it has expired, a request whose task is cancelled ends for that reason."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """Token of the answer with its log-probabilities. `start` is its offset in the text, in characters."""

    start: int
    data: bytes
    logprobs: TokenLogprobs


class Delta(msgspec.Struct):
    """Output that one step added to one choice. Log-probabilities come with the text that they belong to.

    A struct, because one is made for each token: a dataclass takes twice as long to make.
    """

    index: int
    text: str
    token_ids: list[int]
    entries: list[TokenEntry] = []
    finish_reason: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities of the prompt, in a choice's first delta, where requested."""
    vector: bytes | None = None
    """Vector of a prompt, where `SamplingParams.pooling` requests it: little-endian float32, of any
    length.
    """


@dataclass(slots=True)
class TokenUsage:
    """Token counts of a request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    looked_up_tokens: int = 0
    """Prompt tokens looked up in the prefix cache."""
    disk_tokens: int = 0
    """Tokens of `cached_tokens` that came from disk."""
    host_tokens: int = 0
    """Tokens of `cached_tokens` that came from main memory to a GPU."""
    output_tokens: int = 0
    draft_tokens: int = 0
    """Draft tokens of speculative decoding that were verified."""
    accepted_tokens: int = 0
    """Number of them that were accepted."""

    def counts(self) -> dict[str, int]:
        """Return all counts by name; `asdict` takes six times as long."""
        return {name: getattr(self, name) for name in TokenUsage.__slots__}


def sequence_id(request_id: str, number: int) -> str:
    """Id in the engine of choice `number` of a request."""
    return f"{request_id}.{number}"


def request_of(sequence: str) -> str:
    """Id of the request that a sequence belongs to."""
    return sequence.rpartition(".")[0] or sequence


_DEFAULTS: Final[dict[str, Any]] = {
    each.name: getattr(SamplingParams(max_tokens=0), each.name) for each in fields(SamplingParams)
}


def params_json(generation: Generation) -> str:
    """JSON of the sampling parameters that differ from their defaults. Texts are counted, never kept."""
    values = ((name, getattr(generation.params, name), default) for name, default in _DEFAULTS.items())
    params = {name: value for name, value, default in values if value != default}
    params.pop("seed", None)
    if generation.params.pooling is None:
        params["max_tokens"] = generation.max_tokens
    for name in ("bad_words", "logit_bias", "allowed_token_ids", "stop_token_ids", "grammar"):
        if name in params:
            params[name] = len(params[name])
    params.pop("triggers", None)
    if (thinking := params.pop("thinking", None)) is not None and thinking.budget is not None:
        params["thinking_token_budget"] = thinking.budget
    if generation.stop:
        params["stop"] = len(generation.stop)
    return msgspec.json.encode(params).decode()


_MASK = (1 << 64) - 1


def draw_seed() -> int:
    """Draw a random seed below 2^53, so that every JSON parser returns it unchanged."""
    return secrets.randbits(53)


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of an `n > 1` request, as a signed 64-bit integer.

    Choice 0 has the request's own seed, so that n = 1 gives the same answer. The others are splitmix64's
    outputs: sending one of them as `seed` with n = 1 reproduces that choice. Every prompt of a list has the
    same seeds.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - (1 << 64) if z >= 1 << 63 else z


def deadline_error(what: str, code: str) -> ApiError:
    """Error 503 of a missed deadline, so that a client may retry here or elsewhere."""
    return ApiError(
        503,
        f"The time limit of this request ended before {what}. Try again later, or set a longer limit "
        "('timeout', 'first_token_timeout').",
        code=code,
        type="server_error",
        headers={"Retry-After": "2"},
    )


class TimeLimits:
    """Timers of one open request. Use them only from the event loop."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.has_tokens = False
        self.has_ended_answer = False
        """The answer was cut at `finish_by`: its streams end by `abort`, which is then no error."""

    def start(self, cancel: Callable[[ApiError | None], None]) -> None:
        """Start the timers. `cancel` ends the request's streams, with this error or with none."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        for name, at in (
            ("finish", self._generation.finish_by),
            ("first_token", self._generation.first_token_by),
        ):
            if at is not None:
                self._timers[name] = loop.call_later(max(0.0, at - now), self._expire, name, cancel)

    def note_first_token(self) -> None:
        self.has_tokens = True
        if (timer := self._timers.pop("first_token", None)) is not None:
            timer.cancel()

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _expire(self, name: str, cancel: Callable[[ApiError | None], None]) -> None:
        if name == "first_token":
            cancel(deadline_error("its first token came", "first_token_timeout"))
        elif not self.has_tokens:
            cancel(deadline_error("its answer began", "request_timeout"))
        else:
            self.has_ended_answer = True
            self._generation.remarks.append("The answer was ended by the time limit of this request.")
            cancel(None)
