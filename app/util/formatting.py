"""Formatting of sizes, times and text for people: CLI, dashboard and panel."""

from datetime import datetime


def printable(text: str) -> str:
    """Escape control characters from data visibly, so that they cannot move the cursor."""
    return "".join(
        char if char in "\n\t" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def size(count: float | None) -> str:
    """Format bytes."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def span(seconds: float | None) -> str:
    """Format a duration in seconds."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def clock(unix: float) -> str:
    """Format a Unix time as local time."""
    return datetime.fromtimestamp(unix).astimezone().strftime("%Y-%m-%d %H:%M:%S")
