"""Text rendering: lines as spans of (text, tone), numbers as text; and themes: the style of each tone, and
the remembered choice. There is no markup: data is never interpreted.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from textual.color import Color
from textual.theme import BUILTIN_THEMES, Theme

from llmbox.app.telemetry.snapshot import NA, Number
from llmbox.app.util import formatting
from llmbox.app.util.formatting import printable

Span = tuple[str, str]
"""Text and its tone, a name in `TONES`."""
Line = tuple[Span, ...]

DASH: Final = "-"


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters that the terminal can draw."""

    bar: str = "▇"
    """Cell of a meter or a map: lower than a line, so that those below each other stay apart."""
    half: str = "▇"
    rest: str = "▇"
    """Empty cell of a meter, which its tone alone tells from the others."""
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
PLAIN: Final = Glyphs(bar="█", half="▒", rest="░")
"""For text without colors."""
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
    spans.append((glyphs.rest * left, "track"))
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
OWN: Final = (DARK, LIGHT)
NAMES: Final = (
    *(theme.name for theme in OWN),
    *(name for name in BUILTIN_THEMES if not name.startswith("ansi-")),
)
"""Names for `--theme`. The colors of the ANSI themes are the terminal's own, and have no shades."""

TONES: Final = (
    "", "title", "strong", "muted", "rule", "track", "good", "warn", "bad", "accent", "selected", "header",
    "kv", "cached", "kvfree", "work", "others", "tab", "frame",
)  # fmt: skip

_made: dict[tuple[str, bool], dict[str, Style]] = {}


def styles(theme: Theme, *, stale: bool = False) -> dict[str, Style]:
    """Return the Rich style of every tone. `stale` greys all of them: nothing on the screen is current."""
    key = theme.name, stale
    if key not in _made:
        _made[key] = _make(theme, stale=stale)
    return _made[key]


def _make(theme: Theme, *, stale: bool) -> dict[str, Style]:
    variables = theme.to_color_system().generate()

    def color(name: str) -> Color:
        return Color.parse(variables[name])

    back, text = color("background"), color("foreground")
    accent, primary = color("accent"), color("primary")
    if theme.name not in {each.name for each in OWN} and _distance(accent, color("warning")) < 40:
        accent = color("secondary")  # some themes have one color for both
    gray, rule = back.blend(text, 0.68), back.blend(text, 0.2)

    def on_ground(fore: Color, *, bold: bool = False, ground: Color = back) -> Style:
        return Style(color=fore.rich_color, bgcolor=ground.rich_color, bold=bold)

    made = {
        "": on_ground(text),
        "title": on_ground(primary, bold=True),
        "strong": on_ground(text, bold=True),
        "muted": on_ground(gray),
        "rule": on_ground(rule),
        "track": on_ground(back.blend(text, 0.14)),
        "good": on_ground(color("success")),
        "warn": on_ground(color("warning")),
        "bad": on_ground(color("error"), bold=True),
        "accent": on_ground(primary),
        "selected": on_ground(text, bold=True, ground=back.blend(primary, 0.15)),
        "header": on_ground(gray, bold=True, ground=color("surface")),
        "kv": on_ground(accent),
        "cached": on_ground(back.blend(accent, 0.5)),
        "kvfree": on_ground(back.blend(accent, 0.22)),
        "work": on_ground(color("secondary")),
        "others": on_ground(color("warning")),
        "tab": on_ground(back, bold=True, ground=primary),
        "frame": on_ground(text, ground=color("surface")),
    }
    if not stale:
        return made
    return {
        name: style
        if name == "tab"
        else on_ground(
            {"rule": rule, "track": rule}.get(name, gray), ground=Color.from_rich_color(style.bgcolor)
        )
        for name, style in made.items()
    }


def _distance(one: Color, other: Color) -> int:
    return abs(one.r - other.r) + abs(one.g - other.g) + abs(one.b - other.b)


def read_choice(file: Path) -> str:
    """Return the remembered theme, or our dark one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        name = json.loads(file.read_text(encoding="utf-8"))["theme"]
        if name in NAMES:
            return str(name)
    return DARK.name


def remember_choice(file: Path, name: str) -> None:
    """Write the choice for the next start. A folder that cannot be written loses it."""
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps({"theme": name}) + "\n", encoding="utf-8")
        fresh.replace(file)
