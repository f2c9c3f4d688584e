"""Rates from the engines' counters; latencies and failures of recently finished requests."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from llmbox.engine.errors import EngineError
from llmbox.engine.ipc.messages import EngineStats, ModelInfo
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.shape import ModelShape
from llmbox.engine.planning.performance_model import decode_tokens_per_second
from llmbox.kernels.quant_formats import QUANTS

from ..config.entries import LatencyTarget
from ..engines.supervisor import Supervisor
from ..store.record import RequestRecord
from .snapshot import NA, EngineSnapshot, ErrorRate, Gpus, Number

LATENCY_WINDOW_S: Final = 120.0
_MOST = 1024


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median and 95th percentile, in seconds."""

    p50: Number = NA
    p95: Number = NA


@dataclass(frozen=True, slots=True)
class _Ended:
    at: float
    model: str
    ttft: float | None
    tpot: float | None


class Latencies:
    """Latencies of the requests that ended in the window. Use it only from the daemon's event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: deque[_Ended] = deque(maxlen=_MOST)
        self.requests = 0
        self.failed = 0

    def add(self, record: RequestRecord) -> None:
        self.requests += 1
        self.failed += record.is_failure
        self._ended.append(_Ended(self._clock(), record.model, record.ttft_s, record.tpot_s))

    def of(self, model: str | None = None) -> tuple[Percentiles, Percentiles]:
        """Return (time to first token, time per token) of the last two minutes, of one model or of all."""
        oldest = self._clock() - LATENCY_WINDOW_S
        while self._ended and self._ended[0].at < oldest:
            self._ended.popleft()
        chosen = [each for each in self._ended if model in {None, each.model}]
        return _spread(each.ttft for each in chosen), _spread(each.tpot for each in chosen)


def _spread(values: Iterable[float | None]) -> Percentiles:
    known = sorted(value for value in values if value is not None)
    return Percentiles(nearest_rank(known, 0.5), nearest_rank(known, 0.95)) if known else Percentiles()


def nearest_rank(ascending: Sequence[float], share: float) -> float:
    """Percentile by nearest rank. `share` is 0 to 1."""
    return ascending[max(1, math.ceil(share * len(ascending))) - 1]


ERROR_WINDOW_S: Final = 300.0
SLICE_S: Final = 10.0
MOST_MODELS: Final = 100
MOST_REASON: Final = 300


@dataclass(slots=True)
class _Slice:
    begin: float
    answered: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


class ErrorRates:
    """Counts of the last five minutes. Use it only from the daemon's event loop.

    Counts requests that were answered (2xx) or failed, not those with a caller's error or cancelled.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slices: deque[_Slice] = deque()
        self._reasons: dict[str, str] = {}

    def add(self, record: RequestRecord, reason: str = "") -> None:
        """Count a finished request. `reason`: the message of its error."""
        failed = record.is_failure
        if not failed and record.http_status >= 400:
            return
        model = record.model
        now = self._current()
        (now.failed if failed else now.answered)[model] += 1
        if failed:
            self._reasons.pop(model, None)
            self._reasons[model] = (reason or record.error_code)[:MOST_REASON]
            while len(self._reasons) > MOST_MODELS:
                del self._reasons[next(iter(self._reasons))]

    def read(self) -> tuple[ErrorRate, ...]:
        """Models with requests in the window, most failures first."""
        self._drop_old()
        answered = sum((each.answered for each in self._slices), Counter[str]())
        failed = sum((each.failed for each in self._slices), Counter[str]())
        rates = [
            ErrorRate(
                model=model,
                finished=answered[model] + failed[model],
                failed=failed[model],
                rate=failed[model] / (answered[model] + failed[model]),
                reason=self._reasons.get(model, "") if failed[model] else "",
            )
            for model in answered.keys() | failed.keys()
        ]
        return tuple(sorted(rates, key=lambda each: (-each.failed, each.model))[:MOST_MODELS])

    def _current(self) -> _Slice:
        self._drop_old()
        begin = self._clock() // SLICE_S * SLICE_S
        if not self._slices or self._slices[-1].begin != begin:
            self._slices.append(_Slice(begin))
        return self._slices[-1]

    def _drop_old(self) -> None:
        oldest = self._clock() - ERROR_WINDOW_S
        while self._slices and self._slices[0].begin + SLICE_S <= oldest:
            self._slices.popleft()


def total_rate(rates: tuple[ErrorRate, ...]) -> Number:
    """Rate over all models; NA if nothing finished."""
    finished = sum(each.finished for each in rates)
    return sum(each.failed for each in rates) / finished if finished else NA


WINDOW_S: Final = 60.0
"""Window of the prefix hit rate, in seconds."""


class EngineReader:
    """Reader of all engines. Use it only from the daemon's event loop. Counters restart with their engine."""

    def __init__(
        self,
        latencies: Latencies,
        find_target: Callable[[str], LatencyTarget | None] = lambda _: None,
    ) -> None:
        self.latencies = latencies
        self._find_target = find_target
        self._looks: dict[str, deque[tuple[float, EngineStats]]] = {}
        self._shapes: dict[str, ModelShape | None] = {}

    def read(self, supervisors: list[Supervisor], gpus: Gpus) -> tuple[EngineSnapshot, ...]:
        names = {supervisor.name for supervisor in supervisors}
        for name in self._looks.keys() - names:
            del self._looks[name]
        return tuple(self._engine(supervisor, gpus) for supervisor in supervisors)

    def _engine(self, supervisor: Supervisor, gpus: Gpus) -> EngineSnapshot:
        name, stats = supervisor.name, supervisor.stats
        looks = self._looks.setdefault(name, deque())
        tokens_in, tokens_out = self._rates(looks, stats)
        info = supervisor.info
        blocks = stats.blocks_total or (info.num_blocks if info else 0)
        ttft, tpot = self.latencies.of(name)
        target = self._find_target(name)
        described = EngineSnapshot(
            model=name,
            state=supervisor.state,
            cause=supervisor.problem,
            pid=supervisor.pid or 0,
            pids=tuple(supervisor.pids),
            running=stats.running,
            waiting=stats.waiting,
            blocks_total=blocks,
            blocks_live=stats.blocks_used,
            blocks_cached=stats.blocks_cached,
            blocks_free=max(0, blocks - stats.blocks_used - stats.blocks_cached),
            slots_used=stats.slots_used,
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            prefix_hit=_prefix_hit(looks),
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            ttft_p50=ttft.p50,
            ttft_p95=ttft.p95,
            tpot_p50=tpot.p50,
            tpot_p95=tpot.p95,
            ttft_target=NA if target is None else target.ttft,
            tpot_target=NA if target is None else target.tpot,
            target_problem=supervisor.queue.never_met,
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
            draft_methods=stats.draft_methods,
            preemptions=stats.preemptions,
            restarts=supervisor.restarts,
            resumed=supervisor.resumed,
            roofline=NA if info is None else self._roofline(supervisor, info, gpus, tokens_out),
        )
        return described if info is None else _with_facts(described, info)

    def _rates(self, looks: "deque[tuple[float, EngineStats]]", stats: EngineStats) -> tuple[Number, Number]:
        now = time.monotonic()
        if looks and stats.steps < looks[-1][1].steps:
            looks.clear()
        before = looks[-1] if looks else None
        looks.append((now, stats))
        while len(looks) > 2 and now - looks[0][0] > WINDOW_S:
            looks.popleft()
        if before is None or now <= before[0]:
            return NA, NA
        seconds = now - before[0]
        return (
            (stats.prompt_tokens - before[1].prompt_tokens) / seconds,
            (stats.output_tokens - before[1].output_tokens) / seconds,
        )

    def _roofline(self, supervisor: Supervisor, info: ModelInfo, gpus: Gpus, tokens_out: Number) -> Number:
        """Share of the roofline. NA if the memory bandwidth is unknown (CPUs do not report it, and may have
        experts of a model on a GPU) or nothing was generated.
        """
        bandwidth = NA if info.expert_bytes else _bandwidth(info.device, gpus)
        shape = self._shape(supervisor.config.model_path)
        stats = supervisor.stats
        if bandwidth is NA or shape is None or tokens_out is NA or not stats.running or not tokens_out:
            return NA
        bound = decode_tokens_per_second(
            shape,
            info.dtype,
            info.kv_dtype,
            bandwidth,
            rows=stats.running,
            context=stats.slots_used // stats.running,
            quant=QUANTS.get(info.quant),
        )
        return tokens_out / bound

    def _shape(self, path: str) -> ModelShape | None:
        if path not in self._shapes:
            try:
                self._shapes[path] = parse_config(Path(path)).shape()
            except (EngineError, OSError):
                self._shapes[path] = None
        return self._shapes[path]


def _with_facts(engine: EngineSnapshot, info: ModelInfo) -> EngineSnapshot:
    return replace(
        engine,
        device=info.device,
        dtype=info.dtype,
        kernels=info.backend,
        context_window=info.context_window,
        block_size=info.block_size,
        kv_bytes_per_token=info.kv_bytes_per_token,
        weights_bytes=info.weights_bytes,
        kv_bytes=info.kv_bytes,
        workspace_bytes=info.workspace_bytes,
    )


def _prefix_hit(looks: "deque[tuple[float, EngineStats]]") -> Number:
    first, last = looks[0][1], looks[-1][1]
    asked = last.prefix_queries - first.prefix_queries
    return (last.prefix_hits - first.prefix_hits) / asked if asked > 0 else NA


def _bandwidth(device: str, gpus: Gpus) -> Number:
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return NA
    number = int(index) if index.isdigit() else 0
    return gpus.devices[number].bandwidth if number < len(gpus.devices) else NA
