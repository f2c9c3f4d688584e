"""Token buckets by a clock that the test turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbox.app.errors import ApiError
from llmbox.app.security.key_store import KeyStore
from llmbox.app.security.keys import ApiKey, KeySpec
from llmbox.app.security.rate_limit import (
    _MOST_ADDRESSES,
    KeyLimiter,
    KeyLimiters,
    TokenBucket,
    WrongKeyLimiter,
)
from support.clock import Clock


def key(**limits: int | None) -> ApiKey:
    return ApiKey(name="k", id="key_1", digest="", display="", created=0.0, **limits)


def test_a_minutes_worth_at_once_then_evenly() -> None:
    clock = Clock()
    meter = KeyLimiter(key(rpm=6), clock)
    for _ in range(6):
        meter.take_request()
    with pytest.raises(ApiError) as caught:
        meter.take_request()
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    assert caught.value.headers["Retry-After"] == "10"
    clock.now += 9.9
    with pytest.raises(ApiError):
        meter.take_request()
    clock.now += 0.1
    meter.take_request()
    clock.now += 3600  # an idle hour saves up a minute's worth, no more
    for _ in range(6):
        meter.take_request()
    with pytest.raises(ApiError):
        meter.take_request()


def test_answers_are_paid_back_first() -> None:
    clock = Clock()
    meter = KeyLimiter(key(tpm=60), clock)
    answer = meter.reserve_tokens(10, 1000, choices=1)  # an estimate of 30
    answer.spend(110)
    answer.settle()  # 60 below
    with pytest.raises(ApiError) as caught:
        meter.reserve_tokens(10, 0)
    assert caught.value.headers["Retry-After"] == "70"
    clock.now += 70
    meter.reserve_tokens(10, 0)


def test_what_a_request_may_make_is_reserved_and_what_it_did_not_is_given_back() -> None:
    clock = Clock()
    meter = KeyLimiter(key(tpm=500), clock)
    first, _second = meter.reserve_tokens(3, 200), meter.reserve_tokens(3, 200)
    with pytest.raises(ApiError, match="203"):
        meter.reserve_tokens(3, 200)
    first.spend(20)
    first.settle()
    first.settle()
    assert dict(meter.headers())[b"x-ratelimit-remaining-tokens"] == b"274"
    meter.reserve_tokens(3, 200).cancel(3)
    assert dict(meter.headers())[b"x-ratelimit-remaining-tokens"] == b"274"


def test_an_answer_without_a_bound_reserves_an_estimate() -> None:
    def remaining(tpm: int, room: int, choices: int) -> int:
        meter = KeyLimiter(key(tpm=tpm), Clock())
        meter.reserve_tokens(10, room, choices=choices)
        return int(dict(meter.headers())[b"x-ratelimit-remaining-tokens"])

    assert remaining(100_000, 8 * 32_000, 8) == 100_000 - 10 - 8 * 1024
    assert remaining(100_000, 300, 1) == 100_000 - 310
    assert remaining(500, 32_000, 1) == 240


def test_a_prompt_over_a_minutes_worth_waits_for_a_full_bucket() -> None:
    clock = Clock()
    meter = KeyLimiter(key(tpm=60), clock)
    meter.reserve_tokens(500, 100)
    with pytest.raises(ApiError) as caught:
        meter.reserve_tokens(1, 0)
    assert caught.value.headers["Retry-After"] == "541"


def test_headers_have_openais_names() -> None:
    clock = Clock()
    meter = KeyLimiter(key(rpm=60, tpm=100), clock)
    meter.take_request()
    meter.reserve_tokens(50, 0).spend(200)
    told = {name.decode(): value.decode() for name, value in meter.headers()}
    assert told == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "2m30s",
    }
    assert list(KeyLimiter(key(), clock).headers()) == []


def test_no_limit_is_no_limit() -> None:
    meter = KeyLimiter(key(), Clock())
    for _ in range(100):
        meter.take_request()
        meter.reserve_tokens(1 << 40, 1 << 40, choices=1).settle()


def test_a_meter_lives_with_its_key() -> None:
    meters = KeyLimiters(Clock())
    one = key(rpm=1)
    meters.of(one).take_request()
    with pytest.raises(ApiError):
        meters.of(one).take_request()
    meters.of(key(rpm=2)).take_request()  # other limits: a new meter


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 2000)), max_size=50),
)
def test_never_more_than_the_rate_allows(per_minute: int, tries: list[tuple[float, int]]) -> None:
    clock = Clock()
    bucket = TokenBucket(per_minute, clock)
    began, taken, biggest = clock.now, 0, 0
    for pause, cost in tries:
        clock.now += pause
        wait = bucket.take(cost)
        if wait == 0:
            taken += cost
            biggest = max(biggest, cost)
        else:
            clock.now += wait + 1e-6
            assert bucket.take(cost) == 0, "the promised wait is enough"
            taken += cost
            biggest = max(biggest, cost)
    allowed = per_minute + (clock.now - began) * per_minute / 60
    assert taken <= allowed + biggest + 1e-3 * len(tries)


def test_keys_with_the_same_limits_do_not_share(tmp_path) -> None:
    store, meters = KeyStore(tmp_path / "keys.json"), KeyLimiters(Clock())
    one, _ = store.add(KeySpec(name="one", rpm=1))
    other, _ = store.add(KeySpec(name="other", rpm=1))
    meters.of(one).take_request()
    meters.of(other).take_request()


def test_addresses_that_sent_wrong_keys_are_forgotten_in_the_end() -> None:
    limiter = WrongKeyLimiter(Clock())
    for number in range(2 * _MOST_ADDRESSES):
        limiter.take(f"192.0.2.{number}")
    assert len(limiter._buckets) == _MOST_ADDRESSES
