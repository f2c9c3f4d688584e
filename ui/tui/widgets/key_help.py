"""Help lines of the active keys, in groups."""

from collections.abc import Callable, Iterable

from textual.app import App
from textual.binding import ActiveBinding, Binding

from ..rendering import Line

_TEXTUALS = ("scroll_", "page_", "app.focus_", "screen.copy_", "help_quit")
"""Actions of every Textual program that have no use here."""
_GROUPS = ("Screens", "On this screen", "Moving", "Everywhere")


def key_lines(active: Iterable[ActiveBinding], display: Callable[[Binding], str]) -> list[Line]:
    """Format the active bindings in groups; keys of the same action share a line."""
    groups: dict[str, dict[str, list[str]]] = {name: {} for name in _GROUPS}
    for each in active:
        binding = each.binding
        if binding.description and not binding.system and not binding.action.startswith(_TEXTUALS):
            keys = groups[_group(each)].setdefault(_sentence(binding.description), [])
            keys.append(display(binding))
    joined = {
        name: [(" ".join(dict.fromkeys(keys)), text) for text, keys in rows.items()]
        for name, rows in groups.items()
    }
    width = max((len(keys) for rows in joined.values() for keys, _ in rows), default=0)
    lines: list[Line] = []
    for name, rows in joined.items():
        if rows:
            lines += [*([()] if lines else []), ((name, "title"),)]
            lines += [((f"{keys:>{width}}", "accent"), (f"   {text}", "")) for keys, text in rows]
    return lines


def _group(active: ActiveBinding) -> str:
    if active.binding.action.startswith("switch_mode"):
        return "Screens"
    if isinstance(active.node, App):
        return "Everywhere"
    is_move = active.binding.action.startswith(("move(", "scroll("))
    return "Moving" if is_move else "On this screen"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
