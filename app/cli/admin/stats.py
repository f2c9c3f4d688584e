"""`llmbox stats`."""

import json
import math
import time
from collections.abc import Mapping
from typing import Any

import click

from ...lifecycle.program import Command, Program, pass_program
from ...util import formatting
from .. import output


@click.command(cls=Command)
@click.option("--watch", is_flag=True, help="One line each interval until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between lines of --watch; the daemon samples once a second.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@pass_program
def stats(program: Program, *, watch: bool, interval: float, as_json: bool) -> None:
    """Show current load and throughput."""
    if watch:
        _watch(program, interval, as_json=as_json)
        return
    now = program.client.get("/admin/api/stats")
    output.write(json.dumps({"schema": "llmbox.stats/1", **now}) if as_json else _line(now))


def _watch(program: Program, interval: float, *, as_json: bool) -> None:
    due = -math.inf
    with program.client.stream("GET", "/admin/api/events") as stream:
        for kind, data in stream.events():
            # Ticks come a second apart, give or take: a tenth early is in time.
            if kind != "tick" or time.monotonic() < due - 0.1:
                continue
            due = time.monotonic() + interval
            tick = json.loads(data)
            output.write(json.dumps({"schema": "llmbox.tick/1", **tick}) if as_json else _tick_line(tick))


def _tick_line(tick: Mapping[str, Any]) -> str:
    total, host = tick["totals"], tick["host"]
    state = "ready" if tick["ready"] else f"not ready: {tick['cause']}"
    speed = f"{_number(total['tokens_in'])} tok/s in, {_number(total['tokens_out'])} tok/s out"
    parts = [
        state,
        f"models {len(tick['engines'])}",
        f"running {total['running']}, waiting {total['waiting']}",
        f"KV {_percent(total['kv_used'])}",
        speed if total["requests"] or total["open_requests"] else "no requests yet",
        f"CPU {_percent(host['cpu'])}",
        *(f"GPU{gpu['index']} {_percent(gpu['utilisation'])}" for gpu in tick["gpus"]["devices"]),
        *(each["text"] for each in tick["attention"]),
    ]
    return formatting.printable(" | ".join(parts))


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.0f}"


def _percent(share: float | str) -> str:
    return share if isinstance(share, str) else f"{share:.0%}"


def _line(now: Mapping[str, Any]) -> str:
    total = now["total"]
    if total["output_tokens"]:
        speed = f"{total['prompt_tokens']} tokens in, {total['output_tokens']} out so far"
    else:
        speed = "no requests yet"
    state = "ready" if now["ready"] else f"not ready: {now['cause']}"
    hits = (
        f", prefix hits {total['prefix_hits'] / total['prefix_queries']:.0%}"
        if total["prefix_queries"]
        else ""
    )
    right = (
        f", drafts accepted {total['accepted_tokens'] / total['draft_tokens']:.0%}{_by_method(now)}"
        if total["draft_tokens"]
        else ""
    )
    return (
        f"{state} | models {len(now['models'])} | running {total['running']}, waiting {total['waiting']} | "
        f"KV {_share(total):.0%}{hits} | {speed}{right} | restarts {total['restarts']}"
    )


def _by_method(now: Mapping[str, Any]) -> str:
    """Return the acceptance of each method of proposing draft tokens, over all models."""
    counts: dict[str, list[int]] = {}
    for model in now["models"]:
        for method, each in model["stats"].get("draft_methods", {}).items():
            of_method = counts.setdefault(method, [0, 0])
            of_method[0] += each["accepted_tokens"]
            of_method[1] += each["draft_tokens"]
    shares = ", ".join(
        f"{method} {right / tokens:.0%}" for method, (right, tokens) in counts.items() if tokens
    )
    return f" ({shares})" if shares else ""


def _share(total: Mapping[str, Any]) -> float:
    blocks = total["blocks_total"]
    return total["blocks_used"] / blocks if blocks else 0.0
