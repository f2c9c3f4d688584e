from llmbox.app.store.record import RequestRecord
from llmbox.app.telemetry.engine_rates import Latencies, nearest_rank
from llmbox.app.telemetry.snapshot import NA


def record(ttft: float | None, model: str = "m", status: int = 200) -> RequestRecord:
    return RequestRecord(id="r", created=0.0, model=model, endpoint="chat", http_status=status, ttft_s=ttft)


def test_nearest_rank_gives_values_that_were_measured():
    values = [1.0, 2.0, 3.0, 4.0]
    assert [nearest_rank(values, share) for share in (0.0, 0.25, 0.5, 0.51, 0.95, 1.0)] == [1, 1, 2, 3, 4, 4]


def test_by_model_over_two_minutes():
    now = [0.0]
    latencies = Latencies(lambda: now[0])
    assert latencies.of()[0].p50 is NA
    for ttft in (0.1, 0.2, None):
        latencies.add(record(ttft))
    latencies.add(record(9.0, "other", 500))
    assert latencies.of("m")[0].p95 == 0.2
    assert latencies.of()[0].p95 == 9.0
    assert (latencies.requests, latencies.failed) == (4, 1)
    now[0] = 121.0
    assert latencies.of()[0].p50 is NA
