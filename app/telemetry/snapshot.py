"""Snapshot of the box: the data of a `tick` event, which both dashboards read.

A value that a device does not report is `NA` (in JSON `"n/a"`), never None and never zero. Sizes in bytes,
shares 0 to 1, rates per second, times in seconds.
"""

from enum import Enum
from typing import Final

from msgspec import Struct

from llmbox.engine.ipc.messages import DraftCounts

from ..gateway.request_events import LiveRequest


class NotAvailable(Enum):
    NA = "n/a"


NA: Final = NotAvailable.NA
Number = float | NotAvailable


class GpuProcess(Struct, frozen=True, kw_only=True):
    pid: int
    memory: Number
    ours: bool


class GpuReading(Struct, frozen=True, kw_only=True):
    index: int
    name: str
    uuid: str = ""
    problem: str = ""
    """Reason why nothing else is known of it, such as "GPU is lost"."""
    utilisation: Number = NA
    memory_total: Number = NA
    memory_ours: Number = NA
    memory_others: Number = NA
    memory_free: Number = NA
    bandwidth: Number = NA
    """Peak memory bandwidth."""
    temperature: Number = NA
    """Degrees Celsius."""
    power: Number = NA
    power_cap: Number = NA
    """Watts."""
    clock_sm: Number = NA
    clock_memory: Number = NA
    """MHz."""
    pcie: str = "n/a"
    """Current link, such as "gen5 x16"."""
    pcie_in: Number = NA
    pcie_out: Number = NA
    nvlink_in: Number = NA
    nvlink_out: Number = NA
    throttle: tuple[str, ...] = ()
    """Reasons why its clocks are reduced; empty when they are not."""
    processes: tuple[GpuProcess, ...] = ()


class GpuLink(Struct, frozen=True, kw_only=True):
    """Link between two GPUs, in the terms of `nvidia-smi topo -m`."""

    first: int
    second: int
    kind: str


class Gpus(Struct, frozen=True, kw_only=True):
    devices: tuple[GpuReading, ...] = ()
    links: tuple[GpuLink, ...] = ()
    problem: str = ""
    """Reason why there are no readings; also empty where there simply is no GPU."""


class OwnProcess(Struct, frozen=True, kw_only=True):
    pid: int
    role: str
    memory: float
    cpu: Number
    """Cores in use: 1 is one core."""


class Host(Struct, frozen=True, kw_only=True):
    cpu: Number = NA
    cores: int = 0
    memory_total: Number = NA
    memory_available: Number = NA
    disk_total: Number = NA
    disk_free: Number = NA
    processes: tuple[OwnProcess, ...] = ()
    problem: str = ""


class EngineSnapshot(Struct, frozen=True, kw_only=True):
    """One model. `live`, `cached` and free blocks add up to all blocks."""

    model: str
    state: str
    cause: str = ""
    pid: int = 0
    pids: tuple[int, ...] = ()
    """Pids of all its ranks; `pid` is rank 0's."""
    device: str = ""
    """Device of rank 0; sizes are of all ranks together."""
    dtype: str = ""
    kernels: str = ""
    """Running kernel backend, as `Ops.name` says it."""
    context_window: int = 0
    block_size: int = 0
    kv_bytes_per_token: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    workspace_bytes: int = 0
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_live: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    slots_used: int = 0
    tokens_in: Number = NA
    tokens_out: Number = NA
    prefix_hit: Number = NA
    """Share of the last minute's prompt tokens that the prefix cache saved."""
    prefix_queries: int = 0
    prefix_hits: int = 0
    ttft_p50: Number = NA
    ttft_p95: Number = NA
    tpot_p50: Number = NA
    tpot_p95: Number = NA
    ttft_target: Number = NA
    tpot_target: Number = NA
    """Latency target of the model (`usage.targets`), for its 95th percentiles."""
    target_problem: str = ""
    """Reason why requests cannot meet it even alone, found by `limits.admission`."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Draft tokens that were accepted."""
    draft_methods: dict[str, DraftCounts] = {}
    preemptions: int = 0
    restarts: int = 0
    resumed: int = 0
    roofline: Number = NA
    """Output rate as a share of the maximum that the memory bandwidth allows at this batch."""


class ErrorRate(Struct, frozen=True, kw_only=True):
    """Failure rate of one model over the last five minutes, without callers' errors and cancelled
    requests.
    """

    model: str
    finished: int
    failed: int
    """Finished requests that failed by the server's fault: 5xx, engine errors included."""
    rate: float
    """`failed` as a share of `finished`."""
    reason: str = ""
    """Message of the newest failure."""


class Totals(Struct, frozen=True, kw_only=True):
    """Totals over all models."""

    running: int = 0
    waiting: int = 0
    open_requests: int = 0
    tokens_in: Number = NA
    tokens_out: Number = NA
    ttft_p50: Number = NA
    ttft_p95: Number = NA
    tpot_p50: Number = NA
    tpot_p95: Number = NA
    kv_used: Number = NA
    prefix_hit: Number = NA
    requests: int = 0
    """Requests ended since the daemon started."""
    failed: int = 0
    """Requests that failed by the server's fault (5xx); a 4xx is the caller's."""
    error_rate: Number = NA
    """Failed share of the requests of the last five minutes, see `ErrorRate`."""


class Alert(Struct, frozen=True, kw_only=True):
    """Problem that a person should look at. Failures come first."""

    level: str
    """`failure` or `warning`."""
    text: str
    fix: str = ""


class Tick(Struct, frozen=True, kw_only=True):
    time: float
    """Unix seconds."""
    ready: bool = True
    cause: str = ""
    gpus: Gpus = Gpus()
    host: Host = Host()
    engines: tuple[EngineSnapshot, ...] = ()
    totals: Totals = Totals()
    error_rates: tuple[ErrorRate, ...] = ()
    """Models with requests in the last five minutes."""
    attention: tuple[Alert, ...] = ()
    requests: tuple[LiveRequest, ...] = ()
    """Open requests, oldest first; at most `MOST_REQUESTS`."""


MOST_REQUESTS = 500
