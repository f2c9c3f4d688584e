"""Usage from the request log: tokens, cost and goodput by key and model; outcomes over time."""

import pytest

from llmbox.app.config.entries import find_price, find_target
from llmbox.app.store import RequestLog
from llmbox.app.store.record import RequestRecord
from llmbox.app.store.usage import outcomes, usage_by_model

NOON = 1_800_000_000
PRICES = ("tiny=1/2", "*=0/0.5")
TARGETS = ("tiny=500/20",)


def record(at: float, model: str = "tiny", status: int = 200, code: str = "", **values) -> RequestRecord:
    return RequestRecord(
        id=f"r{at}",
        created=NOON + at,
        model=model,
        endpoint="/v1",
        http_status=status,
        error_code=code,
        **values,
    )


@pytest.fixture
def store(tmp_path):
    log = RequestLog(tmp_path / "requests.db")
    log.start()
    yield log
    log.close()


async def of(store, since=NOON):
    found = await usage_by_model(
        store, since, lambda name: find_price(PRICES, name), lambda name: find_target(TARGETS, name)
    )
    return {(each.key, each.model): each for each in found}


async def test_cost_and_goodput_are_counted_by_key_and_model(store):
    answer = {"key": "shop", "prompt_tokens": 500_000, "output_tokens": 250_000}
    store.write(record(1, ttft_s=0.4, tpot_s=0.02, cached_tokens=100, **answer))
    store.write(record(2, ttft_s=0.4, tpot_s=0.021, **answer))  # too slow by token
    store.write(record(3, ttft_s=0.6, tpot_s=0.01, **answer))  # too slow to the first
    store.write(record(4, ttft_s=0.5, **answer))  # one token has no time per token
    store.write(record(5, model="other", ttft_s=9.0, output_tokens=4_000_000))
    store.write(record(-1, ttft_s=0.1, **answer))  # before
    store.flush()
    found = await of(store)
    tiny, other = found["shop", "tiny"], found["", "other"]
    assert (tiny.requests, tiny.measured, tiny.good) == (4, 4, 2)
    assert (tiny.tokens_in, tiny.tokens_cached, tiny.tokens_out) == (2_000_000, 100, 1_000_000)
    assert tiny.cost == 4.0
    assert (other.cost, other.good) == (2.0, None)


async def test_outcomes_tell_failures_from_refusals_and_callers_errors(store):
    for at, status, code in (
        (0, 200, ""),
        (59, 200, ""),
        (60, 429, "queue_full"),
        (61, 503, "model_loading"),
        (62, 503, "engine_crashed"),
        (63, 400, "context_length_exceeded"),
        (130, 500, "internal_error"),
    ):
        store.write(record(at, status=status, code=code))
    store.flush()
    found = await outcomes(store, NOON, NOON + 150, 60)
    assert found.times == [NOON, NOON + 60, NOON + 120]
    assert found.answered == [2, 0, 0]
    assert found.refused == [0, 2, 0]
    assert found.failed == [0, 1, 1]
    assert found.caller == [0, 1, 0]
    assert ((await of(store))["", "tiny"].failed, (await of(store))["", "tiny"].refused) == (2, 2)


async def test_a_log_that_cannot_be_read_is_no_usage(tmp_path):
    (tmp_path / "requests.db").mkdir()
    log = RequestLog(tmp_path / "requests.db")
    log.start()
    assert await of(log) == {}
    assert (await outcomes(log, NOON, NOON + 10, 5)).failed == [0, 0, 0]
    log.close()
