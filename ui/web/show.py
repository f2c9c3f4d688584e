"""Numbers and times in words. What is not known is a dash, never a zero."""

import time
from datetime import datetime
from typing import Any

from llmbox.app.cli import output
from llmbox.app.telemetry.snapshot import NA, Number

NONE = "\N{EN DASH}"


def known(number: Number | None) -> float | None:
    return None if number is None or number is NA else float(number)


def size(number: Number | None) -> str:
    value = known(number)
    return NONE if value is None else output.size(value)


def span(number: Number | None) -> str:
    value = known(number)
    return NONE if value is None else output.span(value)


def percent(number: Number | None) -> str:
    """Of a share. What is small but not nothing is not called 0."""
    value = known(number)
    if value is None:
        return NONE
    return "under 1 %" if 0 < value < 0.01 else f"{100 * value:.0f} %"


def rate(number: Number | None) -> str:
    """A second, with one decimal while it is small."""
    value = known(number)
    return NONE if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def count(number: Number | None) -> str:
    value = known(number)
    return NONE if value is None else f"{value:,.0f}"


def value(anything: Any) -> str:
    """A setting's value."""
    if anything is None:
        return "auto"
    if isinstance(anything, bool):
        return "true" if anything else "false"
    if isinstance(anything, tuple | list):
        return ", ".join(map(str, anything))
    return f"{anything:g}" if isinstance(anything, float) and abs(anything) < 1e6 else str(anything)


def clock(unix: float) -> str:
    """With the date only where it is not today's."""
    then = datetime.fromtimestamp(unix).astimezone()
    today = datetime.now().astimezone().date()
    return then.strftime("%H:%M:%S" if then.date() == today else "%Y-%m-%d %H:%M")


def ago(unix: float | None) -> str:
    if unix is None:
        return "never"
    return f"{output.span(max(1.0, float(int(time.time() - unix))))} ago"
