"""Widgets that draw given lines, and on each change redraw only those that differ."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ..rendering import UNICODE, Glyphs, Line, Span, clean, count, fit
from ..themes import styles


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


MOST_PREFIXES = 5
Cell = tuple[int, int]
"""Number of (live, cached) blocks."""


def strip_lines(blocks: Mapping[str, Any], width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """Draw the blocks in the order of their numbers, row by row. A cell with any live block is drawn as
    live.
    """
    cells = [(live, cached) for number, live, cached, *_ in blocks["cells"] for _ in range(number)]
    groups = _merge_cells(cells, width * rows)
    each = -(-int(blocks["num_blocks"]) // max(1, len(groups)))
    lines: list[Line] = [
        ((" ", ""), *_spans(groups[start : start + width], glyphs)) for start in range(0, len(groups), width)
    ]
    holders = len(blocks["holders"])
    held = f", held by {holders} request{'' if holders == 1 else 's'}" if holders else ""
    evicted = f"; {count(blocks['evictions'])} evictions" if blocks["evictions"] else ""
    lines.append(((f"   {each} block{'' if each == 1 else 's'} a cell, by number{held}{evicted}", "muted"),))
    return lines


def prefix_lines(blocks: Mapping[str, Any], most: int = MOST_PREFIXES) -> list[Line]:
    return [
        (
            (f"   {use['prefix']}  ", ""),
            (f"{count(use['tokens']):>7} tokens {count(use['blocks']):>5} blocks  found ", "muted"),
            (f"{count(use['hits']):>5}x", "strong"),
            (f"  saved {count(use['hits'] * use['tokens'])} tokens", "muted"),
            (f", last {clean(use['last_request'])}", "muted"),
        )
        for use in blocks["prefixes"][:most]
    ]


def _merge_cells(cells: Sequence[Cell], most: int) -> list[Cell]:
    """Merge neighboring cells to at most `most`, each the sum of its part."""
    if len(cells) <= most:
        return list(cells)
    edges = [len(cells) * number // most for number in range(most + 1)]
    parts = (cells[first:last] for first, last in pairwise(edges))
    return [(sum(live for live, _ in part), sum(cached for _, cached in part)) for part in parts]


def _spans(cells: Sequence[Cell], glyphs: Glyphs) -> list[Span]:
    spans: list[Span] = []
    for live, cached in cells:
        mark, tone = (
            (glyphs.bar, "kv") if live else (glyphs.half, "cached") if cached else (glyphs.rest, "rule")
        )
        if spans and spans[-1][1] == tone:
            spans[-1] = (spans[-1][0] + mark, tone)
        else:
            spans.append((mark, tone))
    return spans
