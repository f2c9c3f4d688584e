"""Themes, and tones: a tone names the meaning of a piece of text, and the theme its style."""

from typing import Final

from rich.style import Style
from textual.theme import Theme

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
