"""What a side-by-side run found, as tables."""

import platform
import re
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbox.app.bench.measure import ratio

Rates = dict[str, dict[str, list[float]]]
"""By server and work, one a round."""
CHAT_TOKENS = 4096
"""First prompt of the work `chat`."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One workload on one server in one round."""

    server: str
    width: str
    work: str
    round: int
    rate: float
    """Output tokens a second; of a prefill, and of a chat's second turn, prompt tokens a second until the
    first token.
    """
    ttft_p99: float
    """Of a chat that of the first turn."""
    gap_p99: float | None
    bandwidth: tuple[float, float]
    """GB/s read just before and just after."""


def tables(result: dict[str, Any], works: list[str]) -> str:
    """Markdown: medians of every server, llmbox over the best peer, latencies, the machine meanwhile."""
    rates: Rates = defaultdict(lambda: defaultdict(list))
    for visit in result["visits"]:
        rates[visit.server][visit.work].append(visit.rate)
    parts = [speeds(result["servers"], rates, works), latencies(result), bandwidths(result)]
    parts += [chats(result)] if "chat" in works else []
    return "\n\n".join(parts)


def speeds(servers: dict[str, Any], rates: Rates, works: list[str]) -> str:
    rows = [
        [name, *(rate(rates[name][work]) for work in works), f"{fact['start_s']:.1f} s",
         f"{fact['memory'] / 1e9:.2f} GB"]
        for name, fact in servers.items()
    ]  # fmt: skip
    rows += [
        [f"**{name} / best peer**", *(over_best_peer(rates, name, work) for work in works), "", ""]
        for name in servers
        if is_ours(name)
    ]
    return markdown(["tok/s", *works, "start to first token", "memory"], rows)


def is_ours(name: str) -> bool:
    return name.startswith("llmbox")


def rate(measured: list[float]) -> str:
    return f"{statistics.median(measured):.4g}" if measured else "-"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def over_best_peer(rates: Rates, name: str, work: str) -> str:
    """Each round against whichever peer was best in it."""
    rounds = len(rates[name][work])
    peers = [
        by_work[work] for peer, by_work in rates.items() if len(by_work[work]) == rounds and not is_ours(peer)
    ]
    if not peers or not rounds:
        return "-"
    return str(ratio(rates[name][work], [max(of_round) for of_round in zip(*peers, strict=True)]))


def latencies(result: dict[str, Any]) -> str:
    rows = []
    for name in result["servers"]:
        cells = [name]
        for work in ("8", "32"):
            mine = [visit for visit in result["visits"] if (visit.server, visit.work) == (name, work)]
            cells.append(middle([visit.ttft_p99 for visit in mine]))
            cells.append(middle([visit.gap_p99 for visit in mine if visit.gap_p99 is not None]))
        rows.append(cells)
    head = ["p99 in ms, median of the rounds"]
    head += [f"{what}, {streams} streams" for streams in (8, 32) for what in ("TTFT", "between tokens")]
    return markdown(head, rows)


def chats(result: dict[str, Any]) -> str:
    """How much sooner the second turn answers than the first one."""
    rows = []
    for name in result["servers"]:
        mine = [visit for visit in result["visits"] if (visit.server, visit.work) == (name, "chat")]
        if mine:
            firsts, seconds = [v.ttft_p99 for v in mine], [(CHAT_TOKENS + 64) / v.rate for v in mine]
            rows.append([name, middle(firsts), middle(seconds), str(ratio(firsts, seconds))])
    return markdown(["chat, ms to the first token", "first turn", "second turn", "first / second"], rows)


def middle(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.0f}" if seconds else "-"


def bandwidths(result: dict[str, Any]) -> str:
    probed = [value for one in result["visits"] for value in one.bandwidth]
    low, mid, high = min(probed), statistics.median(probed), max(probed)
    return f"Memory read bandwidth probed beside every figure: {mid:.0f} GB/s ({low:.0f}..{high:.0f})."


def heading(threads: int, rounds: int) -> str:
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return (
        f"{cpu[1] if cpu else platform.machine()}, {threads} threads; {time.strftime('%Y-%m-%d')}; "
        f"{rounds} interleaved rounds, median (range) of the rounds' ratios\n"
    )
