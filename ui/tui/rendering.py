"""Text rendering and colors: lines as spans of (text, tone), and numbers as text. There is no markup: data
is never interpreted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size

from llmbox.app.telemetry.snapshot import NA, Number
from llmbox.app.util import formatting
from llmbox.app.util.formatting import printable

Span = tuple[str, str]
"""Text and its tone, a name in `themes.TONES`."""
Line = tuple[Span, ...]

DASH: Final = "-"


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters that the terminal can draw."""

    bar: str = "█"
    half: str = "▒"
    rest: str = "░"
    dot: str = "●"
    rule: str = "─"
    more: str = "…"
    down: str = "↓"
    up: str = "↑"
    cursor: str = "▸"
    warning: str = "▲"
    degree: str = "°C"
    tick: str = "┤"
    side: str = "│"
    corner: str = "└"
    ascending: str = "▴"
    descending: str = "▾"


UNICODE: Final = Glyphs()
ASCII: Final = Glyphs(
    bar="#", half="+", rest=".", dot="*", rule="-", more="~", down="in ", up="out ",
    cursor=">", warning="!", degree="C", tick="|", side="|", corner="+", ascending="^",
    descending="v",
)  # fmt: skip


def clean(text: str) -> str:
    """Return the text as one line without control characters."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def fit(text: str, width: int, glyphs: Glyphs = UNICODE, *, right: bool = False, middle: bool = False) -> str:
    """Fit text to exactly `width` cells: cut at the end or in the `middle` with a mark, or padded."""
    size = cell_len(text)
    if size > width:
        if width <= 0:
            return ""
        tail = _last_cells(text, (width - 1) // 2) if middle else ""
        return set_cell_size(text, width - 1 - cell_len(tail)) + glyphs.more + tail
    padding = " " * (width - size)
    return padding + text if right else text + padding


def _last_cells(text: str, width: int) -> str:
    """Return the end of the text, at most `width` cells."""
    start = len(text)
    while start > 0 and cell_len(text[start - 1 :]) <= width:
        start -= 1
    return text[start:]


def line_width(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def heading(title: str, width: int, glyphs: Glyphs, note: str = "") -> Line:
    """Draw a heading: `Title ──────────── note`."""
    tail = f" {note}" if note else ""
    rule = glyphs.rule * max(0, width - cell_len(title) - 1 - cell_len(tail))
    return (title, "title"), (" " + rule, "rule"), (tail, "muted")


def bar(parts: Sequence[tuple[float, str]], width: int, glyphs: Glyphs) -> Line:
    """Draw a stacked bar of (share, tone); the rest is empty. A share above zero takes at least one cell."""
    spans: list[Span] = []
    left = width
    for index, (share, tone) in enumerate(parts):
        wanted = round(share * width)
        cells = min(left, max(1, wanted) if share > 0 else 0)
        mark = glyphs.bar if glyphs.bar != "#" or index == 0 else "#+=%@"[index % 5]
        if cells:
            spans.append((mark * cells, tone))
        left -= cells
    spans.append((glyphs.rest * left, "rule"))
    return tuple(spans)


# ------------------------------------------------------------------ numbers in words


def count(value: Number | int | None) -> str:
    if value is None or value is NA:
        return DASH
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def percent(value: Number) -> str:
    """Format a share in percent. Small shares are not called 0."""
    if value is NA:
        return DASH
    return "<1 %" if 0 < value < 0.005 else f"{value * 100:.0f} %"


def gigabytes(value: Number | int) -> str:
    if value is NA:
        return DASH
    return size(value)


def size(value: float) -> str:
    return formatting.size(value, short=True)


def rate(value: Number) -> str:
    return DASH if value is NA else f"{size(value)}/s"


def unit(value: Number, name: str) -> str:
    return DASH if value is NA else f"{value:.0f} {name}"


def seconds(value: Number | None) -> str:
    return DASH if value is None or value is NA else formatting.span(value, padded=True)


def duration(value: float) -> str:
    return formatting.whole_span(value, padded=True)


def known(value: Number, otherwise: float = 0.0) -> float:
    """Return the value for drawing, or `otherwise` if it is not available."""
    return otherwise if value is NA else value


def wrap(text: str, width: int) -> list[Line]:
    """Wrap words to lines of at most `width` cells; a longer word is broken. Empty for an empty text."""
    lines: list[str] = []
    for word in clean(text).split():
        rest = word
        if lines and cell_len(lines[-1]) + 1 + cell_len(rest) <= width:
            lines[-1] += f" {rest}"
            continue
        while cell_len(rest) > width:
            head = set_cell_size(rest, width).rstrip()
            lines.append(head)
            rest = rest[len(head) :]
        if rest:
            lines.append(rest)
    return [((line, ""),) for line in lines]
