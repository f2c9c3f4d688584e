"""`llmbox stats`."""

import json
import time
from collections.abc import Mapping
from typing import Any

import click

from . import output
from .lazy import Command
from .program import Program, pass_program


@click.command(cls=Command)
@click.option("--watch", is_flag=True, help="One line each interval until Ctrl-C.")
@click.option(
    "--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, metavar="S", help="For --watch."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@pass_program
def stats(program: Program, *, watch: bool, interval: float, as_json: bool) -> None:
    """Show load and speed of this moment."""
    before: dict[str, Any] | None = None
    while True:
        now = program.client.get("/admin/api/stats")
        if as_json:
            output.write(json.dumps({"schema": "llmbox.stats/1", **now, "rates": _rates(before, now)}))
        else:
            output.write(_line(before, now))
        if not watch:
            return
        before = now
        time.sleep(interval)


def _rates(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, float] | None:
    """Tokens per second since the last look; None at the first one."""
    if before is None or now["monotonic_s"] <= before["monotonic_s"]:
        return None
    seconds = now["monotonic_s"] - before["monotonic_s"]
    return {
        name: round(max(0, now["total"][name] - before["total"][name]) / seconds, 1)
        for name in ("prompt_tokens", "output_tokens")
    }


def _line(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    total = now["total"]
    rates = _rates(before, now)
    if rates is not None:
        speed = f"{rates['prompt_tokens']:.0f} tok/s in, {rates['output_tokens']:.0f} tok/s out"
    elif total["output_tokens"]:
        speed = f"{total['prompt_tokens']} tokens in, {total['output_tokens']} out so far"
    else:
        speed = "served nothing yet"
    state = "ready" if now["ready"] else f"not ready: {now['cause']}"
    hits = (
        f", prefix hits {total['prefix_hits'] / total['prefix_queries']:.0%}"
        if total["prefix_queries"]
        else ""
    )
    return (
        f"{state} | models {len(now['models'])} | running {total['running']}, waiting {total['waiting']} | "
        f"KV {_share(total):.0%}{hits} | {speed} | restarts {total['restarts']}"
    )


def _share(total: Mapping[str, Any]) -> float:
    blocks = total["blocks_total"]
    return total["blocks_used"] / blocks if blocks else 0.0
