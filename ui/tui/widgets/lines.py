"""Widgets that draw given lines, and on each change redraw only those that differ."""

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ..rendering import UNICODE, Glyphs, Line, fit
from ..theme import styles


class LineWidget(Widget):
    """Base of widgets that are drawn line by line from tones."""

    DEFAULT_CSS = "LineWidget { height: 1fr; width: 1fr; }"
    of_now: bool = False
    """True if the widget keeps its colors when the daemon is gone, as its content is still current."""

    @property
    def glyphs(self) -> Glyphs:
        glyphs: Glyphs = getattr(self.app, "glyphs", UNICODE)
        return glyphs

    @property
    def tones(self) -> dict[str, Style]:
        stale = not self.of_now and bool(getattr(self.app, "is_stale", False))
        return styles(self.app.current_theme, stale=stale)

    def strip_of(self, line: Line, width: int, *, under: str | None = None) -> Strip:
        """Render a line. `under` is a tone whose background lies below all spans."""
        tones = self.tones
        base = tones[under or ""]
        ground = Style(bgcolor=base.bgcolor, bold=base.bold) if under else None
        segments = [Segment(text, tones[tone] + ground if ground else tones[tone]) for text, tone in line]
        return Strip(segments).adjust_cell_length(width, base).simplify()


class Lines(LineWidget):
    """Lines of text, replaced by `show`; lines beyond the widget's height are not drawn."""

    def __init__(self, *, id: str | None = None, classes: str | None = None, of_now: bool = False) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id, classes=classes)
        self.of_now = of_now
        self._lines: tuple[Line, ...] = ()

    def show(self, lines: Sequence[Line]) -> None:
        before, self._lines = self._lines, tuple(lines)
        width = self.size.width
        for row in range(max(len(before), len(self._lines))):
            if before[row : row + 1] != self._lines[row : row + 1]:
                self.refresh(Region(0, row, width, 1))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y >= len(self._lines):
            return Strip.blank(width, self.tones[""])
        return self.strip_of(self._lines[y], width)

    @property
    def plain(self) -> list[str]:
        """Lines as plain text, for tests and the clipboard."""
        return ["".join(text for text, _ in line).rstrip() for line in self._lines]


def cut(line: Line, width: int, glyphs: Glyphs) -> Line:
    """Truncate the line to `width` cells."""
    spans = []
    for text, tone in line:
        piece = fit(text, width, glyphs).rstrip() if len(text) > width else text
        if piece:
            spans.append((piece, tone))
        width -= len(piece)
        if width <= 0:
            break
    return tuple(spans)
