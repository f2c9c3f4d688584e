"""One moment of the box, frozen: what a `tick` event carries and what both dashboards read.

A value that a device does not report is `NA` (on the wire `"n/a"`), never None and never zero. Sizes in
bytes, shares 0 to 1, rates a second, times in seconds.
"""

from enum import Enum
from typing import Final

from msgspec import Struct

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
    """Why nothing else is known of it, such as "GPU is lost"."""
    utilisation: Number = NA
    memory_total: Number = NA
    memory_ours: Number = NA
    memory_others: Number = NA
    memory_free: Number = NA
    bandwidth: Number = NA
    """Peak of its memory."""
    temperature: Number = NA
    """Degrees Celsius."""
    power: Number = NA
    power_cap: Number = NA
    """Watts."""
    clock_sm: Number = NA
    clock_memory: Number = NA
    """MHz."""
    pcie: str = "n/a"
    """Link as it runs now, such as "gen5 x16"."""
    pcie_in: Number = NA
    pcie_out: Number = NA
    nvlink_in: Number = NA
    nvlink_out: Number = NA
    throttle: tuple[str, ...] = ()
    """Why its clocks are held down; empty when they are not."""
    processes: tuple[GpuProcess, ...] = ()


class GpuLink(Struct, frozen=True, kw_only=True):
    """How two GPUs reach each other, in the words of `nvidia-smi topo -m`."""

    first: int
    second: int
    kind: str


class Gpus(Struct, frozen=True, kw_only=True):
    devices: tuple[GpuReading, ...] = ()
    links: tuple[GpuLink, ...] = ()
    problem: str = ""
    """Why there are no readings; empty also where there simply is no GPU."""


class OwnProcess(Struct, frozen=True, kw_only=True):
    pid: int
    role: str
    memory: float
    cpu: Number
    """1 is one core."""


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
    """One model. `live` and `cached` blocks and the free ones make up all."""

    model: str
    state: str
    cause: str = ""
    pid: int = 0
    pids: tuple[int, ...] = ()
    """Of all its ranks; `pid` is the first one's."""
    device: str = ""
    """Of the first rank; sizes are of all together."""
    dtype: str = ""
    kernels: str = ""
    """The backend that runs, as `Ops.name` says it."""
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
    """Share of the prompt tokens of the last minute that the prefix cache saved."""
    prefix_queries: int = 0
    prefix_hits: int = 0
    ttft_p50: Number = NA
    ttft_p95: Number = NA
    tpot_p50: Number = NA
    tpot_p95: Number = NA
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Guessed tokens that were right."""
    preemptions: int = 0
    restarts: int = 0
    resumed: int = 0
    roofline: Number = NA
    """Output rate as a share of what the memory bandwidth allows at this batch."""


class ErrorRate(Struct, frozen=True, kw_only=True):
    """One model's requests of the last five minutes, without those that callers got wrong or cancelled."""

    model: str
    finished: int
    failed: int
    """Of those, by our fault: 5xx, errors of engines included."""
    rate: float
    """`failed` as a share of `finished`."""
    reason: str = ""
    """Message of the newest failure."""


class Totals(Struct, frozen=True, kw_only=True):
    """Over all models."""

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
    """Ended since the daemon started."""
    failed: int = 0
    """Of those, by our fault (5xx); a 4xx is the caller's."""
    error_rate: Number = NA
    """Failed share of the requests of the last five minutes, see `ErrorRate`."""


class Alert(Struct, frozen=True, kw_only=True):
    """Something that a person should look at. Failures stand before the rest."""

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
    """In flight, oldest first; at most `MOST_REQUESTS`."""


MOST_REQUESTS = 500
