from llmbox.app.store.record import RequestRecord
from llmbox.app.telemetry.engine_rates import ErrorRates, total_rate
from llmbox.app.telemetry.snapshot import NA, EngineSnapshot, Tick, find_alerts


def record(status: int, code: str = "", model: str = "m") -> RequestRecord:
    return RequestRecord(
        id="r", created=0.0, model=model, endpoint="chat", http_status=status, error_code=code
    )


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_failures_are_the_servers_alone():
    """Neither callers' errors nor cancellations count, on either side of the share."""
    rates = ErrorRates(Clock())
    for each in (
        record(200),
        record(500, "engine_error"),
        record(503, "engine_failed"),
        record(400, "context_length_exceeded"),
        record(429, "queue_full"),
        record(499, "client_disconnected"),
        record(400, "request_cancelled"),
        record(503, "model_loading"),
        record(503, "model_unloaded"),
        record(503, "server_shutdown"),
    ):
        rates.add(each)
    (found,) = rates.read()
    assert (found.finished, found.failed) == (3, 2)
    assert total_rate(rates.read()) == found.rate == 2 / 3


def test_a_window_of_five_minutes_by_model():
    clock = Clock()
    rates = ErrorRates(clock)
    assert total_rate(rates.read()) is NA
    rates.add(record(500, "engine_error", "bad"), "NaN or infinite logits.")
    clock.now += 200
    rates.add(record(200, model="good"))
    rates.add(record(200, model="bad"))
    assert [(each.model, each.failed, each.finished) for each in rates.read()] == [
        ("bad", 1, 2),
        ("good", 0, 1),
    ]
    assert [each.reason for each in rates.read()] == ["NaN or infinite logits.", ""]
    clock.now += 115
    assert [(each.model, each.failed, each.finished) for each in rates.read()] == [
        ("bad", 0, 1),
        ("good", 0, 1),
    ]
    clock.now += 300
    assert rates.read() == ()


def test_names_without_end_do_not_fill_memory():
    clock = Clock()
    rates = ErrorRates(clock)
    for number in range(1000):
        rates.add(record(500, "engine_error", f"m{number}"), "x" * 10_000)
    assert len(rates.read()) <= 100
    assert max(len(each.reason) for each in rates.read()) <= 300


def test_alerts_say_how_many_why_and_what_next():
    rates = ErrorRates(Clock())
    engines = (EngineSnapshot(model="m", state="ready"), EngineSnapshot(model="n", state="ready"))
    for _ in range(3):
        rates.add(record(500, "engine_error"), "The model gave NaN or infinite logits.")
    for _ in range(99):
        rates.add(record(200, model="n"))
    rates.add(record(500, "engine_error", "n"), "It broke.")
    found = find_alerts(Tick(time=0.0, engines=engines, error_rates=rates.read()))
    assert [(each.level, each.text, each.fix) for each in found] == [
        (
            "failure",
            "m: 3 of 3 requests of the last 5 minutes failed (The model gave NaN or infinite logits)",
            "llmbox requests --errors --model m",
        ),
        (
            "warning",
            "n: 1 of 100 requests of the last 5 minutes failed (It broke)",
            "llmbox requests --errors --model n",
        ),
    ]


def test_an_engine_that_is_down_is_named_once():
    rates = ErrorRates(Clock())
    rates.add(record(503, "engine_failed"))
    engines = (EngineSnapshot(model="m", state="failed", cause="it died"),)
    found = find_alerts(Tick(time=0.0, engines=engines, error_rates=rates.read()))
    assert [each.text for each in found] == ["m: it died"]
