"""Text rendering and colors: lines as spans of (text, tone), and numbers as text. There is no markup: data
is never interpreted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from textual.theme import Theme

from llmbox.app.telemetry.snapshot import NA, Number
from llmbox.app.util import formatting
from llmbox.app.util.formatting import printable

Span = tuple[str, str]
"""Text and its tone, a name in `theme.TONES`."""
Line = tuple[Span, ...]

DASH: Final = "-"


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters that the terminal can draw."""

    bar: str = "█"
    half: str = "▒"
    rest: str = "░"
    sparks: str = "▁▂▃▄▅▆▇█"
    dot: str = "●"
    rule: str = "─"
    more: str = "…"
    down: str = "↓"
    up: str = "↑"
    cursor: str = "▸"
    warning: str = "▲"
    degree: str = "°C"
    dotted: str = "·"


UNICODE: Final = Glyphs()
ASCII: Final = Glyphs(
    bar="#", half="+", rest=".", sparks=".:-=+*%#", dot="*", rule="-", more="~", down="in ", up="out ",
    cursor=">", warning="!", degree="C", dotted="|",
)  # fmt: skip


def clean(text: str) -> str:
    """Return the text as one line without control characters."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def fit(text: str, width: int, glyphs: Glyphs = UNICODE, *, right: bool = False) -> str:
    """Fit text to exactly `width` cells: truncated with a mark, or padded."""
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, max(0, width - 1)) + glyphs.more if width > 0 else ""
    padding = " " * (width - size)
    return padding + text if right else text + padding


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


def spark(values: Sequence[float], width: int, glyphs: Glyphs, *, top: float | None = None) -> str:
    """Draw a sparkline of the newest values, one a cell, from zero to the largest (or `top`). Missing values
    are blank.
    """
    shown = list(values)[-width:]
    high = top or max(shown, default=0.0)
    steps = len(glyphs.sparks)
    marks = [
        " " if value < 0 else glyphs.sparks[min(steps - 1, int(value / high * steps)) if high > 0 else 0]
        for value in shown
    ]
    return "".join(marks).rjust(width)


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


DARK: Final = Theme(
    name="llmbox-dark",
    primary="#7aa2f7",
    secondary="#9ece6a",
    accent="#7dcfff",
    foreground="#c8ccd4",
    background="#14161b",
    surface="#1a1d24",
    panel="#22262f",
    success="#8fbf7f",
    warning="#e0b060",
    error="#e8716f",
    dark=True,
)
LIGHT: Final = Theme(
    name="llmbox-light",
    primary="#2b5fb8",
    secondary="#3f7d2c",
    accent="#0f7391",
    foreground="#22262e",
    background="#fbfbf9",
    surface="#f2f2ee",
    panel="#e6e6e0",
    success="#3f7d2c",
    warning="#96690a",
    error="#b3302e",
    dark=False,
)
THEMES: Final = (DARK, LIGHT)

TONES: Final = (
    "", "title", "strong", "muted", "rule", "good", "warn", "bad", "accent", "selected", "header",
    "kv", "cached", "kvfree", "spark", "work", "others", "tab",
)  # fmt: skip


_made: dict[tuple[str, bool], dict[str, Style]] = {}


def styles(theme: Theme, *, stale: bool = False) -> dict[str, Style]:
    """Return the Rich style of every tone. `stale` greys all of them: nothing on the screen is current."""
    key = theme.name, stale
    if key not in _made:
        _made[key] = _make(theme, stale=stale)
    return _made[key]


def _make(theme: Theme, *, stale: bool) -> dict[str, Style]:
    back, grey = theme.background, "#7d828c" if theme.dark else "#6b6f76"
    rule = "#343a46" if theme.dark else "#d2d2ca"
    plain = Style(color=theme.foreground, bgcolor=back)
    made = {
        "": plain,
        "title": plain + Style(bold=True),
        "strong": plain + Style(bold=True),
        "muted": plain + Style(color=grey),
        "rule": plain + Style(color=rule),
        "good": plain + Style(color=theme.success),
        "warn": plain + Style(color=theme.warning),
        "bad": plain + Style(color=theme.error, bold=True),
        "accent": plain + Style(color=theme.primary),
        "selected": plain + Style(bgcolor=theme.panel, bold=True),
        "header": plain + Style(color=grey, bold=True),
        "kv": plain + Style(color=theme.accent),
        "cached": plain + Style(color="#4d7f95" if theme.dark else "#7fb2c2"),
        "kvfree": plain + Style(color="#34474f" if theme.dark else "#c6dbe0"),
        "spark": plain + Style(color="#4d659c" if theme.dark else "#8fabdc"),
        "work": plain + Style(color=theme.secondary),
        "others": plain + Style(color=theme.warning),
        "tab": plain + Style(color=back, bgcolor=theme.primary, bold=True),
    }
    if not stale:
        return made
    return {
        name: style if name == "tab" else Style(color=rule if name == "rule" else grey, bgcolor=style.bgcolor)
        for name, style in made.items()
    }
