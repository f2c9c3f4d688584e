"""Themes: llmbox's own, Textual's, the styles of the tones in each, and the remembered choice."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Final

from rich.style import Style
from textual.color import Color
from textual.theme import BUILTIN_THEMES, Theme

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
    "", "title", "strong", "muted", "rule", "good", "warn", "bad", "accent", "selected", "header",
    "kv", "cached", "kvfree", "work", "others", "tab",
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
    gray, rule = back.blend(text, 0.6), back.blend(text, 0.2)

    def on_ground(fore: Color, *, bold: bool = False, ground: Color = back) -> Style:
        return Style(color=fore.rich_color, bgcolor=ground.rich_color, bold=bold)

    made = {
        "": on_ground(text),
        "title": on_ground(text, bold=True),
        "strong": on_ground(text, bold=True),
        "muted": on_ground(gray),
        "rule": on_ground(rule),
        "good": on_ground(color("success")),
        "warn": on_ground(color("warning")),
        "bad": on_ground(color("error"), bold=True),
        "accent": on_ground(primary),
        "selected": on_ground(text, bold=True, ground=color("panel")),
        "header": on_ground(gray, bold=True),
        "kv": on_ground(accent),
        "cached": on_ground(back.blend(accent, 0.5)),
        "kvfree": on_ground(back.blend(accent, 0.22)),
        "work": on_ground(color("secondary")),
        "others": on_ground(color("warning")),
        "tab": on_ground(back, bold=True, ground=primary),
    }
    if not stale:
        return made
    return {
        name: style
        if name == "tab"
        else on_ground(rule if name == "rule" else gray, ground=Color.from_rich_color(style.bgcolor))
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
