from types import SimpleNamespace

import pytest

from llmbox.app.bench import measure
from llmbox.app.bench.client import (
    BenchRequest,
    BenchTarget,
    Prompts,
    RequestTiming,
    Workload,
    heavy_tail,
    long_arrival,
    shared_prefix,
)
from llmbox.app.bench.measure import BenchRun, percentile, ratio, summarise


def sample(start: float, times: list[float]) -> RequestTiming:
    return RequestTiming(started=start, token_times=times, tokens=len(times), prompt_tokens=5)


def test_percentiles_are_values_that_were_measured():
    values = [5.0, 1.0, 3.0]
    assert percentile(values, 50) == 3.0
    assert percentile(values, 95) == 5.0
    assert percentile(values, 1) == 1.0
    assert percentile([], 50) is None


def test_ratios_are_taken_round_by_round():
    got = ratio([2.0, 30.0], [1.0, 10.0])
    assert (got.median, got.low, got.high) == (2.5, 2.0, 3.0)
    with pytest.raises(ValueError):
        ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize(("error", "seconds"), [("", 4.0), ("HTTP 429", 8.0)])
async def test_a_run_ends_with_its_last_answer_and_not_when_that_is_read(monkeypatch, error, seconds):
    async def complete(target, prompt, most):
        clock.perf_counter = lambda: 9.0
        return RequestTiming(ended=0.0 if error else 5.0, error=error)

    clock = SimpleNamespace(perf_counter=lambda: 1.0)
    monkeypatch.setattr(measure, "complete", complete)
    monkeypatch.setattr(measure, "time", clock)
    done = await measure.run(BenchTarget("http://x", "m"), Workload([BenchRequest([1], 3)], 1))
    assert (done.seconds, done.is_whole) == (seconds, True)


def test_summary_counts_only_what_succeeded():
    failed = RequestTiming(error="HTTP 429")
    done = BenchRun(
        [(BenchRequest([1], 3), sample(0.0, [0.5, 0.6, 0.8])), (BenchRequest([1], 4), failed)], seconds=2.0
    )
    summary = summarise(done)
    assert (summary.requests, summary.errors, summary.output_tokens) == (2, 1, 3)
    assert summary.output_tokens_per_s == 1.5
    assert summary.ttft_p50 == 0.5
    assert summary.tpot_p50 == pytest.approx(0.15)
    assert summary.inter_token_max == pytest.approx(0.2)


def test_workloads_are_the_same_for_the_same_seed_only():
    first, again, other = (heavy_tail(Prompts(seed, (10, 99)), 8, 4, 16, 20, 64) for seed in "aab")
    assert first == again != other
    assert all(1 <= ask.max_tokens <= 64 and len(ask.prompt) == 16 for ask in first.asks)


def test_shared_prefix_and_long_arrival():
    load = shared_prefix(Prompts("x", (10, 99)), 3, 2, prefix=8, tail=2, output=4)
    assert len({tuple(ask.prompt[:8]) for ask in load.asks}) == 1
    assert len({tuple(ask.prompt) for ask in load.asks}) == 3
    late = long_arrival(Prompts("x", (10, 99)), streams=2, prompt=4, output=9, long_prompt=50).asks[-1]
    assert (late.tag, len(late.prompt), late.after) == ("long", 50, 1.0)
