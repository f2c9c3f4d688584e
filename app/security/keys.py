"""API keys, and their quotas and budgets.

A secret is shown once and never stored: only its SHA-256 is. It holds 256 random bits, so a plain hash is
enough: nobody can try them all, salted or not.

Quotas count requests, tokens and cost in a calendar day and a calendar month, both of UTC. Tokens and their
cost are reserved before a request runs, for its prompt and its longest answer, and unused ones are returned
at its end: concurrent requests cannot spend a quota several times. Counts are kept for all keys, so that a
quota set later counts from the first request of its period. They are written to a file and so survive a
restart.
"""

import hashlib
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, structs

from ..config.entries import TokenPrice
from ..errors import ApiError
from ..util.atomic_file import DelayedFile

Scope = Literal["infer", "read", "admin"]
"""Scopes: `infer` uses models, `read` reads metrics, `admin` does everything."""

Tier = Literal["premium", "standard", "background"]
"""Class of a request by its priority."""

PREFIX = "sk-llmbox-"
_SHOWN = len(PREFIX) + 4
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)"
"""The look-ahead is needed because `$` alone would accept a trailing newline."""

_Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
_Pattern = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$(?!\n)")]
_Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]
_Total = Annotated[int, Meta(ge=1, le=1_000_000_000_000)]
_Amount = Annotated[float, Meta(gt=0, le=1e9)]


class KeySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Permissions and limits of a key, as its creator states them."""

    name: _Name
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1, max_length=3)] = ("infer",)
    models: Annotated[tuple[_Pattern, ...], Meta(max_length=64)] = ()
    """Names or globs (`qwen*`) of allowed models; empty allows all."""
    expires: Annotated[float, Meta(gt=0, lt=1e11)] | None = None
    """Unix seconds."""
    rpm: _Count | None = None
    """Requests per minute."""
    tpm: _Count | None = None
    """Tokens per minute, of prompts and answers together."""
    requests_day: _Total | None = None
    requests_month: _Total | None = None
    tokens_day: _Total | None = None
    """Tokens of prompts and answers together, in a calendar day of UTC."""
    tokens_month: _Total | None = None
    budget_day: _Amount | None = None
    """Cost by `usage.prices`, in a calendar day of UTC."""
    budget_month: _Amount | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Lower goes first; a request may only rank itself behind it."""
    log_content: bool = False
    """Prompts and answers may be kept."""


class KeyChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes of a key: what is unset stays, None takes a limit away."""

    models: Annotated[tuple[_Pattern, ...], Meta(max_length=64)] | UnsetType = UNSET
    expires: Annotated[float, Meta(gt=0, lt=1e11)] | UnsetType | None = UNSET
    rpm: _Count | UnsetType | None = UNSET
    tpm: _Count | UnsetType | None = UNSET
    requests_day: _Total | UnsetType | None = UNSET
    requests_month: _Total | UnsetType | None = UNSET
    tokens_day: _Total | UnsetType | None = UNSET
    tokens_month: _Total | UnsetType | None = UNSET
    budget_day: _Amount | UnsetType | None = UNSET
    budget_month: _Amount | UnsetType | None = UNSET
    priority: Annotated[int, Meta(ge=-100, le=100)] | UnsetType = UNSET
    log_content: bool | UnsetType = UNSET

    def values(self) -> dict[str, Any]:
        return {name: value for name, value in structs.asdict(self).items() if value is not UNSET}


class ApiKey(KeySpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    """Id of the key. Rotation keeps it."""
    digest: str
    """SHA-256 of the secret, in hex."""
    display: str
    """First characters of the secret."""
    created: float
    rotated: float | None = None

    def allows(self, scope: Scope) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def allows_model(self, name: str) -> bool:
        return not self.models or any(fnmatchcase(name, pattern) for pattern in self.models)

    def is_expired(self) -> bool:
        return self.expires is not None and time.time() >= self.expires


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def new_id() -> str:
    return "key_" + secrets.token_hex(8)


def digest_of(secret: str) -> str:
    """SHA-256 of a secret, in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def display_of(secret: str) -> str:
    """First characters of a secret, which may be shown."""
    return secret[:_SHOWN] + "…"


def is_name(text: str) -> bool:
    """Return whether `text` is a valid name of a key."""
    return re.fullmatch(NAME_PATTERN, text) is not None


log = logging.getLogger(__name__)

Period = Literal["day", "month"]
PERIODS: Final[tuple[Period, ...]] = ("day", "month")
EVERY_S: Final = 1.0
"""Seconds between two writes of the counters under load."""
_FREE: Final = TokenPrice(0.0, 0.0)


class PeriodUsage(msgspec.Struct):
    """Usage of one key in one period, without what open requests still reserve."""

    period: str = ""
    """`2030-12-31` or `2030-12`."""
    requests: int = 0
    tokens: int = 0
    cost: float = 0.0
    """In the currency of `usage.currency`, by the prices at the time of each request."""


class KeyCounters(msgspec.Struct):
    """Counters of one key."""

    day: PeriodUsage = msgspec.field(default_factory=PeriodUsage)
    month: PeriodUsage = msgspec.field(default_factory=PeriodUsage)


class KeyQuota:
    """Quota of one key. Use it only from the daemon's event loop."""

    def __init__(
        self,
        counters: KeyCounters,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._counters = counters
        self._changed = changed
        self._clock = clock
        self.reserved_tokens = 0
        self.reserved_cost = 0.0

    def used(self, period: Period) -> PeriodUsage:
        """Usage in the current period."""
        counter: PeriodUsage = getattr(self._counters, period)
        name = datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%d" if period == "day" else "%Y-%m")
        if counter.period != name:
            counter = PeriodUsage(name)
            setattr(self._counters, period, counter)
        return counter

    def take_request(self, key: ApiKey) -> None:
        """Count one request. Raises ApiError 429 where a quota or budget of the key is used up."""
        for period in PERIODS:
            used = self.used(period)
            requests, tokens, budget = _limits(key, period)
            if requests is not None and used.requests >= requests:
                raise self._exceeded(period, f"quota of {requests:,} requests a {period} is used up.")
            if tokens is not None and used.tokens >= tokens:
                raise self._exceeded(period, f"quota of {tokens:,} tokens a {period} is used up.")
            if budget is not None and used.cost >= budget - 1e-9:
                raise self._exceeded(period, f"budget of {budget:g} a {period} is spent.")
        for period in PERIODS:
            self.used(period).requests += 1
        self._changed()

    def reserve(
        self, key: ApiKey, prompt: int, output: int, price: TokenPrice | None, *, is_estimate: bool = False
    ) -> "QuotaReservation":
        """Reserve tokens for a prompt and its answer. Raises ApiError 429.

        An estimate of the answer is lowered to what is left: such an answer is not refused for its length.
        """
        price = price or _FREE
        for period in PERIODS:
            used = self.used(period)
            _, tokens, budget = _limits(key, period)
            if tokens is not None:
                left = max(0, tokens - used.tokens - self.reserved_tokens)
                if is_estimate:
                    output = min(output, max(0, left - prompt))
                if prompt + output > left or (is_estimate and left == 0):
                    needs = f"of {tokens:,} tokens a {period} has {left:,} left; {_needs(prompt + output)}"
                    raise self._exceeded(period, f"quota {needs}")
            if budget is not None:
                left_cost = max(0.0, budget - used.cost - self.reserved_cost)
                if is_estimate and price.output:
                    affordable = (left_cost - price.cost(prompt, 0)) * 1e6 / price.output
                    output = min(output, max(0, math.floor(affordable + 1e-6)))
                if price.cost(prompt, output) > left_cost + 1e-9:
                    needs = f"of {budget:g} a {period} has {left_cost:.4g} left; {_needs(prompt + output)}"
                    raise self._exceeded(period, f"budget {needs}")
        reservation = QuotaReservation(self, output, price)
        reservation.spend_prompt(prompt)
        return reservation

    def add(self, tokens: int, cost: float) -> None:
        """Count tokens that are spent. Negative where they are returned."""
        for period in PERIODS:
            used = self.used(period)
            used.tokens = max(0, used.tokens + tokens)
            used.cost = max(0.0, used.cost + cost)
        self._changed()

    def _exceeded(self, period: Period, what: str) -> ApiError:
        """Build the error, in the words of OpenAI's clients: waiting a moment will not help."""
        reset = _reset(period, self._clock())
        return ApiError(
            429,
            f"This key's {what} It resets at {reset:%Y-%m-%d %H:%M} UTC.",
            "insufficient_quota",
            None,
            "insufficient_quota",
            {
                "Retry-After": str(max(1, math.ceil(reset.timestamp() - self._clock()))),
                "x-should-retry": "false",
            },
        )


class QuotaReservation:
    """Reserved tokens of one request, and their cost."""

    def __init__(self, quota: KeyQuota, output: int, price: TokenPrice) -> None:
        self._quota, self._price = quota, price
        self._left = output
        quota.reserved_tokens += output
        quota.reserved_cost += price.cost(0, output)

    def spend_prompt(self, count: int) -> None:
        self._quota.add(count, self._price.cost(count, 0))

    def spend(self, count: int) -> None:
        """Count tokens of the answer as they come, those beyond an estimate too."""
        self._release(min(count, self._left))
        self._quota.add(count, self._price.cost(0, count))

    def settle(self) -> None:
        """Return what was not used."""
        self._release(self._left)

    def _release(self, count: int) -> None:
        self._left -= count
        self._quota.reserved_tokens -= count
        self._quota.reserved_cost -= self._price.cost(0, count)


class QuotaLedger:
    """Quotas of all keys, by the key's id. The file is read at the first use."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = file, clock
        self._counters: dict[str, KeyCounters] | None = None
        self._quotas: dict[str, KeyQuota] = {}
        self._file = DelayedFile(
            file, EVERY_S, lambda: msgspec.json.encode(dict(self._known())), "usage of keys"
        )

    def of(self, key_id: str) -> KeyQuota:
        quota = self._quotas.get(key_id)
        if quota is None:
            counters = self._known().setdefault(key_id, KeyCounters())
            quota = self._quotas[key_id] = KeyQuota(counters, self._file.touch, self._clock)
        return quota

    def forget(self, key_id: str) -> None:
        self._quotas.pop(key_id, None)
        self._known().pop(key_id, None)

    def close(self) -> None:
        self._file.close()

    def _known(self) -> dict[str, KeyCounters]:
        if self._counters is None:
            try:
                self._counters = msgspec.json.decode(self._path.read_bytes(), type=dict[str, KeyCounters])
            except FileNotFoundError:
                self._counters = {}
            except (OSError, msgspec.MsgspecError, UnicodeError) as error:
                log.warning("%s cannot be read (%s): quotas of keys count from zero again", self._path, error)
                self._counters = {}
        return self._counters


class QuotaView(msgspec.Struct):
    """One quota of a key, and how much of it is used in the current period."""

    kind: Literal["requests", "tokens", "budget"]
    period: Period
    limit: float
    used: float
    resets: float
    """Unix seconds."""


def views(key: ApiKey, quota: KeyQuota, now: float | None = None) -> Iterator[QuotaView]:
    """Yield the quotas of a key."""
    now = time.time() if now is None else now
    for period in PERIODS:
        used = quota.used(period)
        resets = _reset(period, now).timestamp()
        requests, tokens, budget = _limits(key, period)
        if requests is not None:
            yield QuotaView("requests", period, requests, used.requests, resets)
        if tokens is not None:
            yield QuotaView("tokens", period, tokens, used.tokens, resets)
        if budget is not None:
            yield QuotaView("budget", period, budget, used.cost, resets)


def _limits(key: ApiKey, period: Period) -> tuple[int | None, int | None, float | None]:
    if period == "day":
        return key.requests_day, key.tokens_day, key.budget_day
    return key.requests_month, key.tokens_month, key.budget_month


def _reset(period: Period, now: float) -> datetime:
    """Begin of the next period."""
    today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return today + timedelta(days=1)
    return (today.replace(day=1) + timedelta(days=32)).replace(day=1)


def _needs(tokens: int) -> str:
    return (
        f"this request reserves {tokens:,} tokens: its prompt and its longest answer. Ask for fewer, or wait."
    )
