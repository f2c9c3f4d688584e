"""History: three resolutions, retention, and disks that misbehave."""

import asyncio
import sqlite3
import threading

import pytest

from llmbox.app.store import RequestLog
from llmbox.app.telemetry import history as history_module
from llmbox.app.telemetry.history import (
    KEEP,
    TOTAL_SERIES,
    Chart,
    History,
    is_series,
    resample,
    series_of,
    step_for,
)
from llmbox.app.telemetry.snapshot import NA, GpuReading, Gpus, Host, Tick, Totals

NOON = 1_800_000_000


@pytest.fixture
def store(tmp_path):
    log = RequestLog(tmp_path / "requests.db")
    log.start()
    yield log
    log.close()


async def test_each_resolution_holds_means(store):
    history = History(store)
    for second in range(120):
        history.add(NOON + second + 0.5, {"cpu": float(second % 10), "tokens_out": 100.0})
    store.flush()
    fine = await history.chart(1, NOON, ["cpu"])
    assert fine.times == list(range(NOON, NOON + 120))
    assert fine.series["cpu"][:3] == [0.0, 1.0, 2.0]
    ten = await history.chart(10, NOON)
    assert ten.times == list(range(NOON, NOON + 120, 10))
    assert set(ten.series["cpu"]) == {4.5}
    minute = await history.chart(60, NOON)
    assert minute.series == {"cpu": [4.5, 4.5], "tokens_out": [100.0, 100.0]}


async def test_the_last_ten_minutes_need_no_disk(store):
    history = History(store)
    store.close()
    for second in range(650):
        history.add(NOON + second, {"cpu": float(second // 10)})
    assert list(history.trend) == [(NOON + 10 * i, {"cpu": float(i)}) for i in range(4, 64)]


async def test_a_series_that_was_not_there_is_null(store):
    history = History(store)
    history.add(NOON, {"cpu": 0.5})
    history.add(NOON + 1, {"cpu": 0.5, "ttft_p50": 0.1})
    chart = await history.chart(1, NOON, ["ttft_p50", "gpu0.power"])
    assert chart.series == {"ttft_p50": [None, 0.1], "gpu0.power": [None, None]}


async def test_old_points_go(store, tmp_path):
    history = History(store)
    for second in range(0, KEEP[1] + 120, 10):
        history.add(NOON + second, {"cpu": 0.5})
        if second % 100 == 0:
            store.flush()
    history.close()
    store.flush()
    with sqlite3.connect(tmp_path / "requests.db") as connection:
        oldest = dict(connection.execute("SELECT step, min(time) FROM telemetry GROUP BY step").fetchall())
    assert oldest[1] >= NOON + 100
    assert oldest[10] == NOON
    assert oldest[60] == NOON


async def test_history_survives_a_restart_and_a_clock_that_goes_back(tmp_path):
    for value in (0.25, 0.75):
        store = RequestLog(tmp_path / "requests.db")
        store.start()
        history = History(store)
        history.add(NOON, {"cpu": value})
        history.close()
        store.close()
    store = RequestLog(tmp_path / "requests.db")
    store.start()
    assert (await History(store).chart(60, NOON)).series == {"cpu": [0.75]}
    store.close()


async def test_a_locked_file_costs_points_and_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr("llmbox.app.store.database._BUSY_MS", 50)
    store = RequestLog(tmp_path / "requests.db")
    store.start()
    store.flush()
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    history = History(store)
    for second in range(11):
        history.add(NOON + second, {"cpu": 0.5})
    store.flush()
    assert (await history.chart(1, NOON)).times, "what is in memory is still shown"
    other.execute("ROLLBACK")
    history.close()
    store.close()
    assert other.execute("SELECT count(*) FROM telemetry WHERE step = 60").fetchone() == (1,)


async def test_an_error_without_a_message_costs_points_and_no_thread(store, monkeypatch):
    def fail(*_):
        raise MemoryError

    store.flush()
    monkeypatch.setattr("llmbox.app.store.queries.requests.add_telemetry", fail)
    history = History(store)
    for second in range(11):
        history.add(NOON + second, {"cpu": 0.5})
    assert await store.ask(lambda _: "alive") == "alive"
    while not history.dropped:  # noqa: ASYNC110 - reported on the loop
        await asyncio.sleep(0)
    assert history.dropped == 11


async def test_a_long_chart_is_built_off_the_loop(store, monkeypatch):
    threads = []

    def build(*arguments):
        threads.append(threading.current_thread())
        return original(*arguments)

    original = history_module._build_chart
    monkeypatch.setattr(history_module, "_build_chart", build)
    history = History(store)
    for second in range(200):
        history.add(NOON + second, dict.fromkeys(TOTAL_SERIES, 0.123456))
    assert len((await history.chart(1, NOON)).times) == 200
    assert threads[0] is not threading.main_thread()


def test_the_finest_resolution_that_reaches():
    assert [step_for(seconds) for seconds in (0, 600, 601, 21_600, 21_601, 1e9)] == [1, 1, 10, 10, 60, 60]


def test_only_what_is_known_is_kept():
    tick = Tick(
        time=0.0,
        gpus=Gpus(devices=(GpuReading(index=0, name="a", power=412.0), GpuReading(index=1, name="b"))),
        host=Host(cpu=0.5),
        totals=Totals(tokens_out=float("nan"), tokens_in=NA),
    )
    kept = series_of(tick)
    assert kept == {"running": 0, "waiting": 0, "open_requests": 0, "cpu": 0.5, "gpu0.power": 412.0}
    assert all(map(is_series, kept))
    assert not any(map(is_series, ("", "gpu", "gpu0.", "gpux.power", "requests", "gpu0.name")))


def test_resampled_charts_have_neither_spikes_nor_slopes():
    busy = range(NOON, NOON + 60)
    times = [*busy, NOON + 120, NOON + 180]  # idle: one sample a minute
    chart = Chart(1, times, {"rate": [100.0] * 60 + [0.0, 0.0]})
    even = resample(chart, NOON, NOON + 185, 12)
    assert (even.step, even.times) == (16, list(range(NOON, NOON + 176, 16)))  # the last 9 s are left out
    assert even.series["rate"] == [100.0, 100.0, 100.0, 75.0, *[0.0] * 7]


def test_resampled_charts_show_when_the_daemon_did_not_run():
    chart = Chart(10, [NOON, NOON + 10, NOON + 500], {"cpu": [0.5, 0.5, 0.25], "ttft_p50": [None, 1.0, None]})
    even = resample(chart, NOON, NOON + 520, 52)
    assert even.series["cpu"] == [0.5, 0.5, *[None] * 48, 0.25, None]
    assert even.series["ttft_p50"][:3] == [None, 1.0, None]
