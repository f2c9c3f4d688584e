"""Quotas and budgets of keys by a clock that the test turns."""

import stat
from datetime import UTC, datetime

import pytest

from llmbox.app.config.entries import TokenPrice
from llmbox.app.errors import ApiError
from llmbox.app.security.keys import ApiKey, KeyCounters, KeyQuota, QuotaLedger, views
from llmbox.app.security.rate_limit import KeyLimiter, KeyLimiters
from support.clock import Clock

NOON = datetime(2030, 12, 31, 12, tzinfo=UTC).timestamp()
PRICE = TokenPrice(1.0, 10.0)


def key(**limits: float | None) -> ApiKey:
    return ApiKey(name="k", id="key_1", digest="", display="", created=0.0, **limits)


@pytest.fixture
def clock() -> Clock:
    made = Clock()
    made.now = NOON
    return made


def meter(limited: ApiKey, clock: Clock) -> KeyLimiter:
    return KeyLimiter(limited, clock, KeyQuota(KeyCounters(), clock=clock))


def refusal(call) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value


def test_requests_of_a_day_end_with_the_time_of_the_reset(clock: Clock) -> None:
    limited = meter(key(requests_day=2, requests_month=3), clock)
    limited.take_request()
    limited.take_request()
    error = refusal(limited.take_request)
    assert (error.status, error.code, error.type) == (429, "insufficient_quota", "insufficient_quota")
    assert error.headers == {"Retry-After": "43200", "x-should-retry": "false"}
    assert error.message == (
        "This key's quota of 2 requests a day is used up. It resets at 2031-01-01 00:00 UTC."
    )
    clock.now += 12 * 3600  # the new day is a new month too
    for _ in range(2):
        limited.take_request()
    clock.now += 24 * 3600
    limited.take_request()
    assert "3 requests a month" in refusal(limited.take_request).message


def test_open_requests_cannot_spend_a_quota_together(clock: Clock) -> None:
    limited = meter(key(tokens_day=100), clock)
    first = limited.reserve_tokens(20, 30)
    second = limited.reserve_tokens(20, 30)
    error = refusal(lambda: limited.reserve_tokens(1, 0))
    assert "has 0 left" in error.message
    first.spend(10)
    first.settle()  # 20 of its answer were not used
    assert (
        "has 20 left; this request reserves 21 tokens"
        in refusal(lambda: limited.reserve_tokens(1, 20)).message
    )
    third = limited.reserve_tokens(1, 19)
    second.cancel(20)  # it never ran
    third.spend(19)
    third.settle()
    limited.reserve_tokens(20, 30)
    assert refusal(lambda: limited.reserve_tokens(1, 0)).code == "insufficient_quota"


def test_an_answer_of_no_stated_length_takes_what_is_left_and_is_charged_in_full(clock: Clock) -> None:
    limited = meter(key(tokens_day=100), clock)
    answer = limited.reserve_tokens(40, 4000, choices=1)
    assert refusal(lambda: limited.reserve_tokens(1, 4000, choices=1)).status == 429
    answer.spend(90)
    answer.settle()
    assert "100 tokens a day is used up" in refusal(limited.take_request).message


def test_a_budget_counts_cost(clock: Clock) -> None:
    limited = meter(key(budget_month=0.01), clock)
    limited.reserve_tokens(10_000_000, 10)  # a model without a price is free
    first = limited.reserve_tokens(1000, 500, price=PRICE)
    assert "has 0.004 left" in refusal(lambda: limited.reserve_tokens(0, 401, price=PRICE)).message
    first.spend(500)
    first.settle()
    limited.reserve_tokens(0, 400, price=PRICE).spend(400)
    assert "budget of 0.01 a month is spent" in refusal(limited.take_request).message


def test_counts_survive_a_restart_and_a_change_of_the_limits(tmp_path, clock: Clock, caplog) -> None:
    file = tmp_path / "keys-quota.json"
    ledger = QuotaLedger(file, clock)
    unlimited = KeyLimiters(clock, ledger).of(key())
    unlimited.take_request()
    answer = unlimited.reserve_tokens(5, 7, price=PRICE)
    answer.spend(3)
    ledger.close()  # the answer is still open: what it reserved is not used yet
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ledger = QuotaLedger(file, clock)
    meters = KeyLimiters(clock, ledger)
    limited = key(requests_day=1, tokens_month=9, budget_day=1.0)
    shown = [(each.kind, each.period, each.used) for each in views(limited, ledger.of("key_1"), clock.now)]
    assert shown == [("requests", "day", 1), ("budget", "day", pytest.approx(35e-6)), ("tokens", "month", 8)]
    assert refusal(meters.of(limited).take_request).code == "insufficient_quota"
    meters.of(key(requests_day=2)).take_request()
    assert not caplog.records
    file.write_bytes(b"\xff{")
    assert QuotaLedger(file, clock).of("key_1").used("day").requests == 0
    assert f"{file} cannot be read" in caplog.text
    clock.now += 86_400
    assert ledger.of("key_1").used("day").requests == 0


def test_a_refused_quota_gives_the_minutes_tokens_back(clock: Clock) -> None:
    limited = meter(key(tpm=100, tokens_day=10), clock)
    refusal(lambda: limited.reserve_tokens(5, 50))
    limited.reserve_tokens(5, 5)
    assert dict(limited.headers())[b"x-ratelimit-remaining-tokens"] == b"90"
