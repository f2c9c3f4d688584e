"""Modal dialogs: a question, a text input, details to read, the keys."""

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from textual import on
from textual.app import App, ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen, ScreenResultType
from textual.widget import Widget
from textual.widgets import Input, OptionList

from ..rendering import Line, clean, wrap
from .lines import Lines, cut


class Dialog(ModalScreen[ScreenResultType]):
    CSS_PATH = "dialogs.tcss"
    heading: str = ""

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as box:
            box.border_title = self.heading
            yield from self.body()

    def body(self) -> Iterable[Widget]:
        raise NotImplementedError

    def on_mount(self) -> None:
        self.call_after_refresh(self.fill)

    def on_resize(self) -> None:
        self.call_after_refresh(self.fill)

    def fill(self) -> None:
        """Write the lines, once their width is known."""

    def write(self, lines: Sequence[Line]) -> None:
        widget = self.query_one(Lines)
        glyphs = widget.glyphs
        widget.styles.height = len(lines)
        widget.show([cut(line, self.query_one("#dialog").content_size.width, glyphs) for line in lines])


class ConfirmDialog(Dialog[bool]):
    """Confirmation of a destructive action; only `y` means yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,enter,q", "answer(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        self.heading = "Sure?"
        super().__init__()
        self.question = question

    def body(self) -> Iterable[Lines]:
        yield Lines()

    def fill(self) -> None:
        width = max(20, self.query_one("#dialog").content_size.width)
        self.write(
            [
                *wrap(self.question, width),
                (),
                (("y", "accent"), (" yes   ", "muted"), ("n", "accent"), (" no", "muted")),
            ]
        )

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class InputDialog(Dialog[str]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Back")]

    def __init__(self, title: str, hint: str) -> None:
        self.heading = title
        super().__init__()
        self.hint = hint

    def body(self) -> Iterable[Input]:
        yield Input(placeholder=self.hint, compact=True)

    @on(Input.Submitted)
    def _done(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())

    def action_leave(self) -> None:
        self.dismiss("")


class KeyValueDialog(Dialog[None]):
    """Read-only lines of a given width; the dialog grows with the terminal."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "leave", "Back")]

    def __init__(self, title: str, lines: Sequence[Line]) -> None:
        self.heading = clean(title)
        super().__init__()
        self.lines = list(lines)

    def body(self) -> Iterable[Lines]:
        yield Lines()

    def fill(self) -> None:
        self.write(self.lines)

    def action_leave(self) -> None:
        self.dismiss(None)


class HelpDialog(KeyValueDialog):
    """Help on keys, built from the active bindings so that it is always correct."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark", "leave", "Back", show=False)]


class ChoiceDialog(Dialog[str | None]):
    """Choice of one of several names. `preview` is called with the name under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "leave", "Back")]

    def __init__(
        self, title: str, names: Sequence[str], now: str, preview: Callable[[str], None] | None = None
    ) -> None:
        self.heading = title
        super().__init__()
        self.names, self.now, self.preview = names, now, preview

    def body(self) -> Iterable[OptionList]:
        options = OptionList(*(Content(clean(name)) for name in self.names), compact=True)
        options.highlighted = self.names.index(self.now) if self.now in self.names else 0
        yield options

    @on(OptionList.OptionHighlighted)
    def _highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if self.preview is not None:
            self.preview(self.names[event.option_index])

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self.names[event.option_index])

    def action_leave(self) -> None:
        self.dismiss(None)


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
