"""Metrics of `/metrics`.

Names that vLLM also has carry its prefix and meaning; others are `llmbox_*`. Histograms and counters of
requests are updated as requests end. Engine gauges are read at scrape time, so that an idle daemon does
nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from llmbox.engine.ipc.messages import EngineStats

from .store.record import RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 120)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)


_ERRORS = (-30, -10, -5, -2.5, -1, -0.5, -0.25, -0.1, -0.05, 0, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_TOKEN_ERRORS = tuple(error / 20 for error in _ERRORS)


@dataclass(frozen=True, slots=True)
class EngineReading:
    """One model's state at the time of a scrape."""

    model: str
    stats: EngineStats
    restarts: int
    resumed: int
    ready: bool

    @property
    def kv_usage(self) -> float:
        blocks = self.stats.blocks_total
        return self.stats.blocks_used / blocks if blocks else 0.0


class Metrics:
    """Registry of all metrics. Create it once, update it from the gateway, and `render` on request.

    The functions are called at each scrape; `read_spans` returns (spans exported, spans dropped).
    """

    def __init__(
        self,
        read_engines: Callable[[], Iterable[EngineReading]] = tuple,
        read_dropped: Callable[[], int] = int,
        read_spans: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(read_engines, read_dropped, read_spans))
        label = ["model_name", "tier"]
        histogram = self._histogram
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Request to first token.", _LATENCY)
        self._inter_token = histogram("vllm:inter_token_latency_seconds", "Between tokens.", _PER_TOKEN)
        self._tpot = histogram("vllm:request_time_per_output_token_seconds", "Mean per request.", _PER_TOKEN)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Whole request.", _LATENCY)
        self._queue = histogram("vllm:request_queue_time_seconds", "Request to first prefill.", _LATENCY)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "Prefill to first token.", _LATENCY)
        self._decode = histogram("vllm:request_decode_time_seconds", "First token to last.", _LATENCY)
        self._success = Counter(
            "vllm:request_success", "Choices by reason.", [*label, "finished_reason"], registry=self._registry
        )
        self._refused = Counter(
            "llmbox_requests_refused", "Requests refused by code.", ["code"], registry=self._registry
        )
        self._admission = Counter(
            "llmbox_admission",
            "Requests compared with latency targets: admitted, refused, missed (admitted and late).",
            [*label, "outcome"],
            registry=self._registry,
        )
        self._ttft_error = histogram(
            "llmbox_ttft_forecast_error_seconds", "Time to first token less its forecast.", _ERRORS
        )
        self._tpot_error = histogram(
            "llmbox_tpot_forecast_error_seconds", "Time per output token less its forecast.", _TOKEN_ERRORS
        )
        self._failed = Counter(
            "llmbox_requests_failed",
            "Requests that failed by the server's fault (5xx), by code.",
            ["model_name", "code"],
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name", "tier"], buckets=buckets, registry=self._registry)

    def inter_token_observer(self, model: str, tier: str) -> Callable[[float], None]:
        """Return the function that takes the seconds between two tokens. Looking up its labels for each token
        would cost more than observing.
        """
        observe: Callable[[float], None] = self._inter_token.labels(model, tier).observe
        return observe

    def record_refusal(self, code: str) -> None:
        """Count a request that was refused before it reached an engine."""
        self._refused.labels(code).inc()

    def record_admission(self, model: str, tier: str, outcome: str) -> None:
        """Count a decision by latency targets, or an admitted request that missed them."""
        self._admission.labels(model, tier, outcome).inc()

    def record_forecast(
        self, record: RequestRecord, measured: float | None, ttft: float, tpot: float
    ) -> None:
        """Record the error of an admitted request's forecast. `measured`: its TTFT without a load."""
        labels = record.model, record.tier
        if measured is not None:
            self._ttft_error.labels(*labels).observe(measured - ttft)
        if record.tpot_s is not None:
            self._tpot_error.labels(*labels).observe(record.tpot_s - tpot)

    def record_failure(self, record: RequestRecord) -> None:
        """Count a request that failed by the server's fault, before or after it reached an engine."""
        if record.is_failure:
            self._failed.labels(record.model, record.error_code).inc()

    def record_request(self, record: RequestRecord, waited: float) -> None:
        """Record a finished request that had reached an engine, `waited` seconds after it came."""
        self.record_failure(record)
        labels = record.model, record.tier
        for reason in filter(None, record.finish_reasons.split(",")):
            self._success.labels(*labels, reason).inc()
        for histogram, seconds in (
            (self._ttft, record.ttft_s),
            (self._tpot, record.tpot_s),
            (self._e2e, record.e2e_s),
            (self._queue, record.queue_s),
        ):
            if seconds is not None:
                histogram.labels(*labels).observe(seconds)
        if record.ttft_s is not None:
            self._prefill.labels(*labels).observe(max(0.0, record.ttft_s - waited - (record.queue_s or 0.0)))
            if record.e2e_s is not None:
                self._decode.labels(*labels).observe(max(0.0, record.e2e_s - record.ttft_s))

    def render(self) -> bytes:
        """Prometheus text exposition, `CONTENT_TYPE`."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Collector that reads the engines at each scrape."""

    def __init__(
        self,
        read_engines: Callable[[], Iterable[EngineReading]],
        read_dropped: Callable[[], int],
        read_spans: Callable[[], tuple[int, int]],
    ) -> None:
        self._read_engines = read_engines
        self._read_dropped = read_dropped
        self._read_spans = read_spans

    def describe(self) -> list[Metric]:
        # Registering would otherwise read the engines before there are any.
        return []

    def collect(self) -> Iterator[Metric]:
        readings = list(self._read_engines())
        for rows, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, text, field in rows:
                metric = family(name, text, labels=["model_name"])
                for reading in readings:
                    metric.add_metric([reading.model], attrgetter(field)(reading))
                yield metric
        for name, text, field in _DRAFT_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name", "method"])
            for reading in readings:
                for method, counts in reading.stats.draft_methods.items():
                    counter.add_metric([reading.model, method], getattr(counts, field))
            yield counter
        for name, text, field in _EXPERT_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            for reading in readings:
                if value := attrgetter(field)(reading):
                    gauge.add_metric([reading.model], value)
            yield gauge
        yield CounterMetricFamily(
            "llmbox_request_log_dropped", "Log rows lost to a full disk or queue.", value=self._read_dropped()
        )
        exported, dropped = self._read_spans()
        yield CounterMetricFamily(
            "llmbox_trace_spans_exported", "Spans that the collector took.", value=exported
        )
        yield CounterMetricFamily(
            "llmbox_trace_spans_dropped", "Spans lost to a full queue or the collector.", value=dropped
        )


_Row = tuple[str, str, str]
"""Name of a metric, its description, and the field of an `EngineReading` that it shows. Rows of
`_DRAFT_COUNTERS` name a field of `DraftCounts`.
"""

_DRAFT_COUNTERS: tuple[_Row, ...] = (
    ("llmbox_spec_decode_num_drafts", "Times that guesses of a method were verified.", "drafts"),
    ("llmbox_spec_decode_num_draft_tokens", "Guessed tokens of a method.", "draft_tokens"),
    (
        "llmbox_spec_decode_num_accepted_tokens",
        "Guessed tokens of a method that were right.",
        "accepted_tokens",
    ),
)

_GAUGES: tuple[_Row, ...] = (
    ("vllm:num_requests_running", "Requests in the batch.", "stats.running"),
    ("vllm:num_requests_waiting", "Requests that wait for the batch.", "stats.waiting"),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_usage"),
    ("llmbox_kv_blocks_cached", "KV blocks that only the prefix cache holds.", "stats.blocks_cached"),
    ("llmbox_engine_ready", "1 while the engine serves.", "ready"),
)

_EXPERT_GAUGES: tuple[_Row, ...] = (
    (
        "llmbox_expert_imbalance",
        "Rows of a layer's busiest expert over the mean of its experts, mean of the layers; of mixtures.",
        "stats.expert_imbalance",
    ),
    (
        "llmbox_expert_rank_imbalance",
        "Rows of the busiest rank over the mean of ranks, mean of the layers, since experts last moved.",
        "stats.expert_rank_imbalance",
    ),
    (
        "llmbox_expert_rank_imbalance_without_copies",
        "What it would be for the same rows without copies of hot experts (--redundant-experts).",
        "stats.expert_rank_imbalance_without_copies",
    ),
)

_COUNTERS: tuple[_Row, ...] = (
    ("llmbox_expert_rows", "Rows that experts of a mixture computed.", "stats.expert_rows"),
    (
        "llmbox_expert_moves",
        "Experts of a layer that went to another rank while the engine ran (--redundant-experts).",
        "stats.expert_moves",
    ),
    ("vllm:prompt_tokens", "Prompt tokens computed.", "stats.prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "stats.output_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up.", "stats.prefix_queries"),
    ("vllm:prefix_cache_hits", "Prompt tokens found.", "stats.prefix_hits"),
    ("llmbox_kv_disk_hits", "Prompt tokens found that came from disk.", "stats.disk_hits"),
    ("llmbox_kv_host_hits", "Prompt tokens found in main memory, of a GPU.", "stats.host_hits"),
    (
        "llmbox_kv_host_saved_bytes",
        "Bytes of KV blocks copied to main memory when a GPU evicted them.",
        "stats.host_saved_bytes",
    ),
    (
        "llmbox_kv_host_loaded_bytes",
        "Bytes of KV blocks copied from main memory back to a GPU.",
        "stats.host_loaded_bytes",
    ),
    (
        "llmbox_kv_host_skipped",
        "KV blocks that a GPU evicted and main memory did not keep.",
        "stats.host_skipped",
    ),
    ("llmbox_kv_disk_written_bytes", "Bytes of KV blocks written to disk.", "stats.disk_written_bytes"),
    ("llmbox_kv_disk_read_bytes", "Bytes of KV blocks read from disk.", "stats.disk_read_bytes"),
    ("llmbox_kv_disk_damaged", "KV blocks on disk that were damaged.", "stats.disk_damaged"),
    ("llmbox_kv_disk_late", "Requests that the disk was too slow for.", "stats.disk_late"),
    (
        "llmbox_kv_disk_skipped",
        "KV blocks not written: evicted before, or refused by the disk.",
        "stats.disk_skipped",
    ),
    ("llmbox_handover_tokens", "Prompt tokens whose KV the prefill engine gave.", "stats.handed_tokens"),
    ("llmbox_handover_damaged", "KV blocks of it that were refused.", "stats.handed_damaged"),
    ("llmbox_prefill_restarts", "Prefill engines restarted.", "stats.prefill_restarts"),
    ("vllm:num_preemptions", "Preemptions by recompute.", "stats.preemptions"),
    ("vllm:spec_decode_num_drafts", "Times that guesses were verified.", "stats.drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Guessed tokens.", "stats.draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right.", "stats.accepted_tokens"),
    ("llmbox_engine_steps", "Steps run.", "stats.steps"),
    ("llmbox_engine_step_seconds", "Time inside steps.", "stats.step_seconds"),
    ("llmbox_engine_prefill_steps", "Steps with prompts.", "stats.work.prefill_steps"),
    ("llmbox_engine_prefill_seconds", "Time of steps with prompts.", "stats.work.prefill_seconds"),
    ("llmbox_engine_prefill_tokens", "Prompt tokens computed.", "stats.work.prefill_tokens"),
    ("llmbox_engine_restarts", "Engine processes restarted.", "restarts"),
    ("llmbox_requests_resumed", "Requests that went on after a restart.", "resumed"),
)
