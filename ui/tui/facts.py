"""Details in two columns, and one request in full."""

import time
from collections.abc import Mapping
from typing import Any

from .request_rows import time_bar
from .text import Glyphs, Line, clean, seconds, size


def fact_lines(facts: Mapping[str, Any], prefix: str = "") -> list[Line]:
    """Nested facts are led by their name; what is empty is left out."""
    lines: list[Line] = []
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            lines += fact_lines(value, f"{name}.")
        elif value not in (None, "", [], False):
            lines.append(((f"{clean(name):<24}", "muted"), (clean(_told(key, value)), "")))
    return lines


def request_lines(detail: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[Line]:
    lines = time_bar(detail, width, glyphs)
    if lines:
        lines.append(())
    return [*lines, *fact_lines({key: value for key, value in detail.items() if value != "{}"})]


def _told(key: str, value: object) -> str:
    if isinstance(value, float) and (key.endswith("_s") or key in {"age", "ttft"}):
        return seconds(value)
    if isinstance(value, float) and key in {"created", "time", "loaded_at", "last_used", "modified"}:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if isinstance(value, int) and key.endswith("_bytes"):
        return size(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
