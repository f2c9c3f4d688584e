"""A made-up box for the dashboard: ticks, answers of the admin API, no daemon and no clock."""

import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from llmbox.app.admin_client import AnswerPiece
from llmbox.app.errors import CliError, Exit
from llmbox.app.inspect.detail import as_curl, content_note, prefix_note
from llmbox.app.store.record import LiveRequest, RequestRecord
from llmbox.app.telemetry.snapshot import (
    Alert,
    EngineSnapshot,
    ErrorRate,
    GpuLink,
    GpuReading,
    Gpus,
    Host,
    OwnProcess,
    Tick,
    Totals,
    find_alerts,
)

NOON = 1_800_014_400.0
GB = 10**9


def live_request(number: int, **changes: Any) -> LiveRequest:
    values: dict[str, Any] = {
        "id": f"req-{number}", "model": "qwen3-8b", "endpoint": "chat", "key": "", "client": "127.0.0.1",
        "state": "decode", "age": 3.5 + number, "stream": True, "n": 1, "prompt_tokens": 100 + number,
        "cached_tokens": 64, "output_tokens": 40 + number, "ttft": 0.21, "tokens_per_second": 48.2,
        "resumes": 0,
    }  # fmt: skip
    return LiveRequest(**values | changes)


def gpu(index: int = 0, **changes: Any) -> GpuReading:
    values: dict[str, Any] = {
        "index": index, "name": "NVIDIA H200", "utilisation": 0.62, "memory_total": 141.0 * GB,
        "memory_ours": 86.0 * GB, "memory_others": 4.0 * GB, "memory_free": 51.0 * GB, "temperature": 61.0,
        "power": 412.0, "power_cap": 700.0, "clock_sm": 1980.0, "clock_memory": 3201.0, "pcie": "gen5 x16",
        "pcie_in": 1.5e9, "pcie_out": 3e8, "nvlink_in": 22e9, "nvlink_out": 21e9,
    }  # fmt: skip
    return GpuReading(**values | changes)


def engine(**changes: Any) -> EngineSnapshot:
    values: dict[str, Any] = {
        "model": "qwen3-8b", "state": "ready", "device": "cuda:0", "context_window": 40_960, "block_size": 16,
        "kv_bytes_per_token": 147_456, "weights_bytes": 16 * GB, "kv_bytes": 60 * GB,
        "workspace_bytes": 3 * GB, "running": 12, "waiting": 3, "blocks_total": 25_000, "blocks_live": 9_000,
        "blocks_cached": 5_000, "blocks_free": 11_000, "slots_used": 138_000, "tokens_in": 812.0,
        "tokens_out": 1234.5, "prefix_hit": 0.41, "prefix_queries": 182_000, "prefix_hits": 64_000,
        "ttft_p50": 0.21, "ttft_p95": 0.93, "tpot_p50": 0.011, "preemptions": 2, "roofline": 0.37,
    }  # fmt: skip
    return EngineSnapshot(**values | changes)


def tick(second: int = 0, **changes: Any) -> Tick:
    """A busy box with one GPU."""
    running = 12 + second % 3
    values: dict[str, Any] = {
        "time": NOON + second,
        "gpus": Gpus(devices=(gpu(), gpu(1, utilisation=0.03, memory_ours=0.0, power=92.0)),
                     links=(GpuLink(first=0, second=1, kind="NV18"),)),
        "host": Host(
            cpu=0.34, cores=64, memory_total=512.0 * GB, memory_available=431.0 * GB, disk_total=3800.0 * GB,
            disk_free=1210.0 * GB,
            processes=(OwnProcess(pid=7, role="daemon", memory=121e6, cpu=0.02),
                       OwnProcess(pid=8, role="engine qwen3-8b", memory=4.1e9, cpu=1.07)),
        ),
        "engines": (engine(running=running),),
        "totals": Totals(
            running=running, waiting=3, open_requests=running + 3, tokens_in=812.0 + second,
            tokens_out=1234.5 + 200 * (second % 7), ttft_p50=0.21, ttft_p95=0.93, tpot_p50=0.011,
            tpot_p95=0.02, kv_used=0.36, prefix_hit=0.41, requests=4182, failed=1,
            error_rate=0.002,
        ),
        "error_rates": (ErrorRate(model="qwen3-8b", finished=500, failed=1, rate=0.002),),
        "requests": tuple(
            live_request(number, **({"state": "queued", "ttft": None, "tokens_per_second": None,
                                     "output_tokens": 0} if number > running else {}))
            for number in range(1, running + 4)
        ),
    }  # fmt: skip
    return Tick(**values | changes)


def idle_tick(**changes: Any) -> Tick:
    return Tick(time=NOON, host=tick().host, **changes)


def failing_tick() -> Tick:
    return tick(
        ready=False,
        cause="qwen3-8b: the engine died",
        attention=(
            Alert(
                level="failure",
                text="qwen3-8b: the engine died 5 times in 60 s",
                fix="llmbox unload qwen3-8b",
            ),
            Alert(level="warning", text="GPU 0: 93 °C"),
        ),
        engines=(engine(state="failed", cause="the engine died 5 times in 60 s"),),
    )


def erring_tick() -> Tick:
    """An engine that is ready and fails requests."""
    rates = (ErrorRate(model="qwen3-8b", finished=12, failed=9, rate=0.75, reason="NaN or infinite logits."),)
    erring = tick(error_rates=rates)
    totals = msgspec.structs.replace(erring.totals, error_rate=0.75)
    return msgspec.structs.replace(erring, totals=totals, attention=find_alerts(erring))


def record(number: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "seq": number, "id": f"old-{number}", "created": NOON - 40 * number, "model": "qwen3-8b",
        "endpoint": "/v1/chat/completions", "http_status": 200, "key": "", "stream": True,
        "finish_reasons": "stop", "error_code": "", "prompt_tokens": 512, "cached_tokens": 256,
        "output_tokens": 200 + number, "n": 1, "queue_s": 0.05, "ttft_s": 0.25, "tpot_s": 0.011,
        "e2e_s": 2.5, "resumes": 0, "seed": 7, "params": '{"temperature":0.7}', "client": "127.0.0.1",
        "looked_up_tokens": 496, "prefix_end": "diverged", "output_hash": "", "fingerprint": "fp",
        "content": "",
    }  # fmt: skip
    return values | changes


def detail(row: dict[str, Any]) -> dict[str, Any]:
    """What the admin API makes of it, with nothing kept."""
    told = RequestRecord(**{name: value for name, value in row.items() if name != "seq"})
    return {
        "in_flight": None,
        "request": row,
        "prefix_note": prefix_note(told),
        "content": None,
        "content_note": content_note(told, None, 7.0, foreign=False),
        "curl": as_curl("http://127.0.0.1:7411", told),
    }


def answers() -> dict[str, dict[str, Any]]:
    """What the admin API of that box says, by path."""
    info = {"device": "cuda:0", "weights_bytes": 16 * GB, "kv_bytes": 60 * GB, "context_window": 40_960}
    models = [
        {"name": "qwen3-8b", "state": "ready", "cause": "", "ref": "Qwen/Qwen3-8B", "info": info,
         "progress": None, "open_requests": 15, "pinned": True, "expires_s": None},
        {"name": "smollm", "state": "loading", "cause": "", "ref": "smollm", "info": None,
         "progress": {"phase": "weights", "done": 40, "total": 100}, "open_requests": 0, "expires_s": 290.0},
    ]  # fmt: skip
    log = [
        {"time": NOON - 9, "level": "info", "component": "daemon", "message": "llmbox 0.1.0 listens"},
        {"time": NOON - 5, "level": "warning", "component": "engines", "message": "slow \x1b[31m answer"},
        {"time": NOON - 1, "level": "error", "component": "engines", "message": "old-2 brought it down"},
    ]
    level = {
        "concurrency": 1,
        "output_tokens_per_s": 91.0,
        "ttft_p50": 0.2,
        "ttft_p95": 0.3,
        "tpot_p50": 0.01,
    }
    runs = [
        {"time": NOON - 60, "model": "qwen3-8b", "url": "http://x", "levels": [level | {"ttft_p50": 0.1}]},
        {"time": NOON - 9000, "model": "qwen3-8b", "url": "http://x", "levels": [level]},
    ]
    findings = [
        {"name": "python", "status": "ok", "message": "3.11.7", "fix": ""},
        {"name": "gpu", "status": "ok", "message": "H200, 51.0 GB of 141.0 GB free", "fix": ""},
        {"name": "disk (state)", "status": "failed", "message": "12 MB free", "fix": "free some space"},
        {"name": "models", "status": "note", "message": "none on disk", "fix": "llmbox pull ORG/NAME"},
    ]
    ended = [
        record(1),
        record(2, http_status=500, error_code="engine_error", finish_reasons="error"),
        record(3, http_status=429, error_code="queue_full", output_tokens=0, tpot_s=None, ttft_s=None),
    ]
    return {
        "blocks?cells=1024": {"models": [blocks()]},
        "marks?since=0&limit=50": {"marks": marks()},
        "requests?limit=300": {"in_flight": [], "requests": ended, "dropped": 0},
        **{f"requests/{row['id']}": detail(row) for row in ended},
        "requests/req-1": {"in_flight": msgspec.to_builtins(live_request(1)), "request": None},
        "models": {"models": models},
        "disk": {"models": [{"name": "qwen3-8b", "size": 16 * GB, "servable": True, "ref": "Qwen/Qwen3-8B"},
                            {"name": "org/old", "size": 7 * GB, "servable": True, "ref": "org/old"}]},
        "downloads": {"downloads": [{"model": "org/new", "state": "downloading", "done": 30, "total": 120}]},
        "logs?lines=500": {"lines": log},
        "bench": {"runs": runs},
        "doctor": {"ok": False, "findings": findings},
    }  # fmt: skip


def blocks() -> dict[str, Any]:
    """Of 25,000 blocks, 25 a cell: three requests, a cached stretch, and free ones with islands."""
    runs = [[200, 25, 0, 0, 1], [100, 25, 0, 1, 2], [60, 3, 22, 2, 1], [140, 0, 25, 3, 0], [90, 0, 0, -1, 0],
            [10, 0, 25, 3, 0], [400, 0, 0, -1, 0]]  # fmt: skip
    uses = [
        {"prefix": "8b1ee740f8b1", "tokens": 2048, "blocks": 128, "hits": 31, "last_request": "req-3"},
        {"prefix": "00c4a1d29f3e", "tokens": 512, "blocks": 32, "hits": 7, "last_request": "req-9"},
    ]
    return {
        "model": "qwen3-8b", "as_of": NOON, "block_size": 16, "num_blocks": 25_000, "blocks_a_cell": 25,
        "cells": runs, "owners": ["req-1", "req-2", "req-3", "old-1"], "prefixes": uses, "evictions": 1234,
        "holders": [{"request_id": f"req-{n}", "blocks": 900 - n, "shared": 40} for n in range(1, 13)],
    }  # fmt: skip


def marks() -> list[dict[str, Any]]:
    return [
        {"time": NOON - 60, "kind": "load", "model": "qwen3-8b", "text": "ready"},
        {"time": NOON - 90, "kind": "eviction", "model": "smollm", "text": "to make room for qwen3-8b"},
        {
            "time": NOON - 400,
            "kind": "refusal",
            "model": "qwen3-8b",
            "text": "12 requests refused: queue_full",
        },
        {"time": NOON - 90_000, "kind": "restart", "model": "qwen3-8b", "text": "killed by SIGKILL"},
    ]


class FakeApi:
    """Answers from a table. `push` sends an event; `posted` remembers what was wanted."""

    def __init__(self, table: dict[str, dict[str, Any]] | None = None) -> None:
        self.table = answers() if table is None else table
        self.posted: list[tuple[str, Any]] = []
        self.refusal = ""
        self.asked: list[Any] = []
        self.pieces: list[tuple[bool, str] | None] = []
        """Pieces of each answer; None waits for `stop`."""
        self.asking, self.stopped = threading.Event(), threading.Event()
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._arrived = threading.Condition()
        self._closed = self._broken = False

    def get(self, path: str) -> dict[str, Any]:
        try:
            return self.table[path]
        except KeyError:
            raise CliError(f"nothing at {path}", exit=Exit.NOT_FOUND) from None

    def post(self, path: str, body: Any) -> dict[str, Any]:
        if self.refusal:
            raise CliError(self.refusal)
        self.posted.append((path, body))
        return {}

    def ask(self, body: Any) -> Iterator[AnswerPiece]:
        self.asked.append(body)
        if self.refusal:
            raise CliError(self.refusal)
        for piece in self.pieces:
            if piece is None:
                self.asking.set()
                assert self.stopped.wait(30)
                raise CliError("the stream broke off")
            yield AnswerPiece(*piece)

    def stop(self) -> None:
        self.stopped.set()

    def push(self, kind: str, data: Any) -> None:
        with self._arrived:
            self._waiting.append((kind, msgspec.to_builtins(data)))
            self._arrived.notify_all()

    def break_off(self) -> None:
        """The daemon is gone, for now."""
        with self._arrived:
            self._broken = True
            self._arrived.notify_all()

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        while True:
            with self._arrived:
                while not self._waiting and not self._closed and not self._broken:
                    self._arrived.wait()
                if self._broken:
                    raise CliError("lost the daemon", "nobody listens")
                if self._closed:
                    return
                event = self._waiting.pop(0)
            yield event

    def close(self) -> None:
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()
