"""Formatting of the daemon's log lines. Lines of another origin (a crash, a library) stay as they are."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import CliError
from ...util.formatting import clock, printable

LEVEL_WORDS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    component: str
    level: str


def parse(raw: str) -> Line:
    try:
        entry = json.loads(raw)
        text = f"{clock(entry['time'])} {entry['level']:7} {entry['component']:8} {entry['message']}"
        if trace := entry.get("trace"):
            text += "\n" + trace
        return Line(printable(text), entry["component"], entry["level"])
    except (ValueError, KeyError, TypeError):
        return Line(printable(raw), "stderr", "error")


def last_lines(path: Path, offset: int, count: int) -> list[str]:
    """Return the last lines written after `offset`; from the start when the file was rotated since."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(offset if offset <= file.tell() else 0)
            raw = file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return []
    lines = [part for line in raw.splitlines() if line.strip() for part in parse(line).text.splitlines()]
    return lines[-count:]


def error_in(lines: Sequence[str]) -> CliError | None:
    """Return the last error that `print_error` wrote."""
    starts = [index for index, line in enumerate(lines) if line.startswith("Error: ")]
    if not starts:
        return None
    what, *rest = lines[starts[-1] :]
    parts = {"Why": "", "Try": ""}
    for line in rest:
        label, _, text = line.strip().partition(": ")
        if label in parts:
            parts[label] = text
    return CliError(what.removeprefix("Error: "), parts["Why"], parts["Try"])
