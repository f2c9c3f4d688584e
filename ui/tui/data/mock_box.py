"""Simulation of a busy box for `llmbox top --mock`: three models on two GPUs. A seed gives one course."""

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from llmbox.app.store.record import LiveRequest
from llmbox.app.telemetry.engine_rates import nearest_rank
from llmbox.app.telemetry.snapshot import (
    NA,
    EngineSnapshot,
    ErrorRate,
    GpuLink,
    GpuReading,
    Gpus,
    Host,
    Number,
    OwnProcess,
    Tick,
    Totals,
    find_alerts,
)

GB = 10**9
LATENCY_S, ERROR_S = 120.0, 300.0
BLOCK = 16
CALLERS = ("web-shop", "alice-laptop", "nightly-batch", "")
FAILURES = ((500, "engine_error"), (429, "queue_full"), (400, "context_length_exceeded"), (499, "cancelled"))


@dataclass(frozen=True, slots=True)
class MockModel:
    name: str
    device: str
    weights: int
    kv_bytes: int
    num_blocks: int
    context: int
    max_running: int
    rate: float
    """Requests a second."""
    speed: float
    """Output tokens a second of one request alone."""
    prompt: int
    """Median prompt tokens."""
    output: int
    """Median output tokens; 0 for an embedding model."""
    ttft_target: Number = NA
    tpot_target: Number = NA


MODELS = (
    MockModel("Qwen/Qwen3-30B-A3B-Instruct-2507", "cuda:0", 61 * GB, 52 * GB, 33_000, 65_536, 24, 0.95, 96.0,
              5200, 420, 1.5, 0.04),
    MockModel("meta-llama/Llama-3.3-70B-Instruct-AWQ", "cuda:1", 40 * GB, 30 * GB, 6_000, 32_768, 12, 0.25,
              38.0, 900, 300),
    MockModel("BAAI/bge-m3", "cuda:1", 2 * GB, GB, 2_000, 8_192, 8, 3.0, 0.0, 300, 0),
)  # fmt: skip


@dataclass(slots=True)
class MockRequest:
    id: str
    model: MockModel
    key: str
    arrived: float
    prompt: int
    cached: int
    wanted: int
    scheduled: float | None = None
    first_token: float | None = None
    output: float = 0.0

    def live(self, now: float) -> LiveRequest:
        waiting, prefill = self.scheduled is None, self.first_token is None or self.first_token > now
        decoding = max(1.0, now - (self.first_token or now))
        return LiveRequest(
            id=self.id,
            model=self.model.name,
            endpoint="/v1/chat/completions",
            key=self.key,
            client="127.0.0.1",
            state="queued" if waiting else "prefill" if prefill else "decode",
            age=now - self.arrived,
            stream=True,
            n=1,
            prompt_tokens=self.prompt,
            cached_tokens=0 if waiting else self.cached,
            output_tokens=int(self.output),
            ttft=None if prefill or self.first_token is None else self.first_token - self.arrived,
            tokens_per_second=None if prefill else self.output / decoding,
            resumes=0,
        )


@dataclass(slots=True)
class MockModelState:
    """Requests and rates of one model."""

    waiting: list[MockRequest] = field(default_factory=list)
    running: list[MockRequest] = field(default_factory=list)
    tokens_in: float = 0.0
    tokens_out: float = 0.0
    queries: int = 0
    hits: int = 0

    @property
    def blocks(self) -> int:
        return sum(math.ceil((each.prompt + each.output) / BLOCK) for each in self.running)


class MockBox:
    """Call `advance` for each second; `records` holds ended requests, newest first."""

    def __init__(self, seed: int, start: float) -> None:
        self.now = start
        self.records: deque[dict[str, Any]] = deque(maxlen=500)
        self.ended: list[dict[str, Any]] = []
        """Requests that ended in the last second."""
        self.requests = 0
        self.failed = 0
        self._random = random.Random(seed)  # noqa: S311 - for show
        self._start = start
        self._states = {model: MockModelState() for model in MODELS}
        self._gpu_load = [0.0, 0.0]

    def advance(self) -> Tick:
        """Simulate one second and return its tick."""
        self.now += 1.0
        self.ended = []
        for model, state in self._states.items():
            self._admit(model, state)
            self._compute(model, state)
        self.records.extendleft(self.ended)
        return self.tick()

    # ------------------------------------------------------------------ requests

    def _admit(self, model: MockModel, state: MockModelState) -> None:
        at = self.now - self._start
        wave = 1 + 0.5 * math.sin(at / 47) + 0.35 * math.sin(at / 13 + model.rate)
        burst = 3.2 if 80 < at % 240 < 92 and model.output else 1.0
        expected = model.rate * wave * burst
        arrivals = int(expected) + (self._random.random() < expected % 1)
        for _ in range(arrivals):
            prompt = max(8, int(self._random.lognormvariate(math.log(model.prompt), 0.7)))
            cached = (
                int(prompt * self._random.choice((0, 0, 0.5, 0.8))) // BLOCK * BLOCK if model.output else 0
            )
            wanted = (
                max(4, int(self._random.lognormvariate(math.log(model.output), 0.6))) if model.output else 0
            )
            request = MockRequest(
                f"chatcmpl-{self._random.getrandbits(40):010x}",
                model,
                self._random.choice(CALLERS),
                self.now - self._random.random(),
                prompt,
                cached,
                wanted,
            )
            if self._random.random() < 0.012:
                self._end(request, *self._random.choice(FAILURES))
            else:
                state.waiting.append(request)
        while state.waiting and len(state.running) < model.max_running:
            request = state.waiting.pop(0)
            request.scheduled = max(request.arrived, self.now - 1) + 0.01
            prefill = (request.prompt - request.cached) / 24_000 + 0.06 + 0.012 * len(state.running)
            request.first_token = request.scheduled + prefill
            state.running.append(request)

    def _compute(self, model: MockModel, state: MockModelState) -> None:
        speed = model.speed / (1 + 0.03 * len(state.running)) * self._random.uniform(0.94, 1.06)
        state.tokens_in = state.tokens_out = 0.0
        for request in list(state.running):
            first = request.first_token or self.now
            if first > self.now - 1:
                state.tokens_in += request.prompt - request.cached
                state.queries += request.prompt
                state.hits += request.cached
            seconds = min(1.0, max(0.0, self.now - first))
            made = min(seconds * speed, request.wanted - request.output)
            request.output += made
            state.tokens_out += made
            if request.output >= request.wanted and first <= self.now:
                state.running.remove(request)
                self._end(request, 200, "")

    def _end(self, request: MockRequest, status: int, code: str) -> None:
        first, scheduled = request.first_token, request.scheduled
        took = max(0.0, self.now - request.arrived)
        decode = max(0.0, self.now - first) if first is not None else 0.0
        self.requests += 1
        self.failed += status >= 500
        self.ended.append({
            "seq": self.requests, "id": request.id, "created": request.arrived, "model": request.model.name,
            "endpoint": "/v1/chat/completions" if request.model.output else "/v1/embeddings",
            "http_status": status, "key": request.key, "stream": bool(request.model.output),
            "finish_reasons": "stop" if status == 200 else "", "error_code": code,
            "prompt_tokens": request.prompt, "cached_tokens": request.cached,
            "output_tokens": int(request.output), "n": 1,
            "queue_s": None if scheduled is None else max(0.0, scheduled - request.arrived),
            "ttft_s": None if first is None or not request.wanted else first - request.arrived,
            "tpot_s": decode / (request.output - 1) if request.output > 1 and decode else None,
            "e2e_s": took, "resumes": 0, "seed": 7, "params": '{"temperature":0.7}', "client": "127.0.0.1",
            "looked_up_tokens": request.prompt, "prefix_end": "", "output_hash": "", "fingerprint": "",
            "tier": "standard", "content": "",
        })  # fmt: skip

    # ------------------------------------------------------------------ tick

    def tick(self) -> Tick:
        engines = tuple(self._engine(model, state) for model, state in self._states.items())
        live = [
            each.live(self.now)
            for state in self._states.values()
            for each in (*state.running, *state.waiting)
        ]
        rates = self._error_rates()
        ttft, tpot = self._spread("ttft_s"), self._spread("tpot_s")
        blocks = sum(engine.blocks_total for engine in engines)
        finished = sum(rate.finished for rate in rates)
        tick = Tick(
            time=self.now,
            gpus=Gpus(
                devices=tuple(self._gpu(index) for index in range(2)),
                links=(GpuLink(first=0, second=1, kind="NV18"),),
            ),
            host=self._host(engines),
            engines=engines,
            totals=Totals(
                running=sum(engine.running for engine in engines),
                waiting=sum(engine.waiting for engine in engines),
                open_requests=len(live),
                tokens_in=sum(state.tokens_in for state in self._states.values()),
                tokens_out=sum(state.tokens_out for state in self._states.values()),
                ttft_p50=ttft[0],
                ttft_p95=ttft[1],
                tpot_p50=tpot[0],
                tpot_p95=tpot[1],
                kv_used=sum(engine.blocks_live for engine in engines) / blocks,
                prefix_hit=_share(self._states.values()),
                requests=self.requests,
                failed=self.failed,
                error_rate=sum(rate.failed for rate in rates) / finished if finished else NA,
            ),
            error_rates=rates,
            requests=tuple(sorted(live, key=lambda each: -each.age)),
        )
        return Tick(
            **{name: getattr(tick, name) for name in tick.__struct_fields__}
            | {"attention": find_alerts(tick)}
        )

    def _engine(self, model: MockModel, state: MockModelState) -> EngineSnapshot:
        live = min(model.num_blocks, state.blocks)
        cached = min(model.num_blocks - live, int(0.45 * model.num_blocks) + state.hits // BLOCK % 900)
        ttft, tpot = self._spread("ttft_s", model.name), self._spread("tpot_s", model.name)
        return EngineSnapshot(
            model=model.name,
            state="ready",
            device=model.device,
            dtype="bfloat16",
            kernels="triton",
            context_window=model.context,
            block_size=BLOCK,
            kv_bytes_per_token=model.kv_bytes // (model.num_blocks * BLOCK),
            weights_bytes=model.weights,
            kv_bytes=model.kv_bytes,
            workspace_bytes=2 * GB,
            running=len(state.running),
            waiting=len(state.waiting),
            blocks_total=model.num_blocks,
            blocks_live=live,
            blocks_cached=cached,
            blocks_free=model.num_blocks - live - cached,
            slots_used=int(live * BLOCK * 0.97),
            tokens_in=state.tokens_in,
            tokens_out=state.tokens_out,
            prefix_hit=_share([state]),
            prefix_queries=state.queries,
            prefix_hits=state.hits,
            ttft_p50=ttft[0],
            ttft_p95=ttft[1],
            tpot_p50=tpot[0],
            tpot_p95=tpot[1],
            ttft_target=model.ttft_target,
            tpot_target=model.tpot_target,
        )

    def _gpu(self, index: int) -> GpuReading:
        device = f"cuda:{index}"
        here = [(model, state) for model, state in self._states.items() if model.device == device]
        busy = max((len(state.running) / model.max_running for model, state in here), default=0.0)
        load = self._gpu_load[index] = 0.6 * self._gpu_load[index] + 0.4 * (0.15 + 0.8 * busy)
        ours = float(sum(model.weights + model.kv_bytes + 2 * GB for model, _ in here))
        total = 141.0 * GB if index == 0 else 80.0 * GB
        return GpuReading(
            index=index,
            name="NVIDIA H200" if index == 0 else "NVIDIA H100 80GB",
            utilisation=load,
            memory_total=total,
            memory_ours=ours,
            memory_others=0.6 * GB,
            memory_free=total - ours - 0.6 * GB,
            temperature=38.0 + 34 * load,
            power=90.0 + 560 * load,
            power_cap=700.0,
            clock_sm=1980.0,
            clock_memory=3201.0,
            pcie="gen5 x16",
            pcie_in=2e8 + 1.4e9 * load,
            pcie_out=1e8 + 4e8 * load,
            nvlink_in=1e9 * load,
            nvlink_out=1e9 * load,
        )

    def _host(self, engines: tuple[EngineSnapshot, ...]) -> Host:
        running = sum(engine.running for engine in engines)
        own = [OwnProcess(pid=7, role="daemon", memory=138e6, cpu=0.01 + running * 0.004)]
        own += [
            OwnProcess(
                pid=8 + at, role=f"engine {engine.model}", memory=3.4e9, cpu=0.3 + 0.03 * engine.running
            )
            for at, engine in enumerate(engines)
        ]
        return Host(
            cpu=min(1.0, 0.05 + running * 0.006),
            cores=64,
            memory_total=512.0 * GB,
            memory_available=431.0 * GB,
            disk_total=3800.0 * GB,
            disk_free=1210.0 * GB,
            processes=tuple(own),
        )

    def _spread(self, name: str, model: str | None = None) -> tuple[Number, Number]:
        values = sorted(
            row[name]
            for row in self.records
            if row["created"] > self.now - LATENCY_S
            and row[name] is not None
            and model in {None, row["model"]}
        )
        return (nearest_rank(values, 0.5), nearest_rank(values, 0.95)) if values else (NA, NA)

    def _error_rates(self) -> tuple[ErrorRate, ...]:
        rates = []
        for model in MODELS:
            rows = [r for r in self.records if r["model"] == model.name and r["created"] > self.now - ERROR_S]
            finished = sum(row["http_status"] < 400 or row["http_status"] >= 500 for row in rows)
            failed = sum(row["http_status"] >= 500 for row in rows)
            if finished:
                reason = "NaN or infinite logits" if failed else ""
                rates.append(
                    ErrorRate(
                        model=model.name,
                        finished=finished,
                        failed=failed,
                        rate=failed / finished,
                        reason=reason,
                    )
                )
        return tuple(sorted(rates, key=lambda each: -each.failed))


def _share(states: Any) -> Number:
    queries = sum(state.queries for state in states)
    return sum(state.hits for state in states) / queries if queries else NA
