"""Widgets that draw given lines or a table of fixed column widths, and redraw only what changed.

Textual's DataTable measures and keeps every cell; at a hundred live rows a second this one costs a tenth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from ..rendering import UNICODE, Glyphs, Line, Span, clean, count, fit, styles


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
        """Render a line. `under` is a tone whose background lies below all spans but tabs."""
        tones = self.tones
        base = tones[under or ""]
        ground = Style(bgcolor=base.bgcolor, bold=base.bold or None) if under else Style.null()
        segments = [
            Segment(text, tones[tone] if tone == "tab" else tones[tone] + ground) for text, tone in line
        ]
        return Strip(segments).adjust_cell_length(width, base).simplify()


class Lines(LineWidget):
    """Lines of text, replaced by `show`; lines beyond the widget's height are not drawn."""

    under: ClassVar[str | None] = None
    """Tone whose background lies below the text."""

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
        return self.strip_of(self._lines[y], width, under=self.under)

    @property
    def plain(self) -> list[str]:
        """Lines as plain text, for tests and the clipboard."""
        return ["".join(text for text, _ in line).rstrip() for line in self._lines]


def cut(line: Line, width: int, glyphs: Glyphs) -> Line:
    """Truncate the line to `width` cells."""
    spans = []
    for text, tone in line:
        piece = fit(text, width, glyphs).rstrip() if cell_len(text) > width else text
        if piece:
            spans.append((piece, tone))
        width -= cell_len(piece)
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


def prefix_lines(blocks: Mapping[str, Any]) -> list[Line]:
    return [
        (
            (f"   {use['prefix']}  ", ""),
            (f"{count(use['tokens']):>7} tokens {count(use['blocks']):>5} blocks  found ", "muted"),
            (f"{count(use['hits']):>5}x", "strong"),
            (f"  saved {count(use['hits'] * use['tokens'])} tokens", "muted"),
            (f", last {clean(use['last_request'])}", "muted"),
        )
        for use in blocks["prefixes"][:MOST_PREFIXES]
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
            (glyphs.bar, "kv") if live else (glyphs.half, "cached") if cached else (glyphs.rest, "track")
        )
        if spans and spans[-1][1] == tone:
            spans[-1] = (spans[-1][0] + mark, tone)
        else:
            spans.append((mark, tone))
    return spans


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table. `width` 0 takes the remaining space. Columns of higher `rank` are hidden first when
    space is short.
    """

    title: str
    width: int
    right: bool = False
    rank: int = 0
    middle: bool = False
    """Cut long texts in the middle: names differ at both ends."""
    least: int = 10
    """Minimum width in cells of a column that takes the remaining space."""
    sortable: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a table: `cells` in the order of the columns; `key` identifies the row."""

    key: str
    cells: tuple[Span, ...]
    values: tuple[Any, ...] = ()
    """Values to sort by, in the order of the columns; else the texts of the cells."""
    drawn: Mapping[int, Line] = field(default_factory=dict)
    """Cells of several tones, as wide as their column, by its index."""
    group: int = 0
    """Groups are not mixed by sorting."""


class FixedTable(ScrollView, LineWidget, can_focus=True):
    """Table widget. The cursor stays on its row (by key) whatever rows come and go."""

    DEFAULT_CSS = """
    FixedTable {
        height: 1fr; width: 1fr; overflow-x: hidden; overflow-y: auto;
        scrollbar-size-vertical: 1; scrollbar-color: $panel-lighten-2; scrollbar-background: $background;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "move(-10)", "Page up", show=False),
        Binding("pagedown", "move(10)", "Page down", show=False),
        Binding("home,g", "move(-1000000)", "First", show=False),
        Binding("end,G", "move(1000000)", "Last", show=False),
        Binding("enter", "choose", "Details", key_display="enter"),
    ]

    class Chosen(Message):
        """Enter was pressed, or the row under the cursor was clicked."""

        def __init__(self, grid: "FixedTable", key: str) -> None:
            super().__init__()
            self.grid, self.key = grid, key

        @property
        def control(self) -> "FixedTable":
            return self.grid

    class Moved(Message):
        """The cursor went to another row."""

    class Sorted(Message):
        """The header of a column was clicked, or `sort_by` was called."""

        def __init__(self, grid: "FixedTable") -> None:
            super().__init__()
            self.grid = grid

        @property
        def control(self) -> "FixedTable":
            return self.grid

    def __init__(self, columns: Sequence[Column], empty: str, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.sort_column: int | None = None
        """Column that the rows are sorted by; None leaves them in the order given."""
        self.descending = True
        self.columns = tuple(columns)
        self.empty = empty
        """Hint shown where there are no rows."""
        self.rows: tuple[Row, ...] = ()
        self.follow = False
        """True if the last row stays visible, as in a log."""
        self._cursor_key: str | None = None

    # ------------------------------------------------------------------ content

    def show(self, rows: Sequence[Row], empty: str | None = None) -> None:
        before, at = self.rows, self.cursor
        self.rows = self._sort(rows)
        if empty is not None and empty != self.empty:
            self.empty = empty
            self.refresh()
        if self._cursor_key is None or all(row.key != self._cursor_key for row in self.rows):
            self._cursor_key = self.rows[min(at, len(self.rows) - 1)].key if self.rows else None
        if len(before) != len(self.rows):
            self.virtual_size = Size(self.size.width, len(self.rows) + 1)
            if self.follow:
                self.action_move(len(self.rows))
            self.refresh()
            return
        top = self.scroll_offset.y
        for y in range(1, self.size.height):
            old, new = before[top + y - 1 : top + y], self.rows[top + y - 1 : top + y]
            if old != new:
                self.refresh(Region(0, y, self.size.width, 1))

    def _sort(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        column = self.sort_column
        if column is None:
            return tuple(rows)

        def value(row: Row) -> Any:
            return row.values[column] if row.values else row.cells[column][0].casefold()

        known = [row for row in rows if value(row) is not None]
        known.sort(key=value, reverse=self.descending)
        known += [row for row in rows if value(row) is None]
        return tuple(sorted(known, key=lambda row: row.group))

    def sort_by(self, column: int | None, *, descending: bool | None = None) -> None:
        """Sort by a column: numbers begin with the largest, texts with the first. None ends it."""
        self.sort_column = column
        if column is not None:
            self.descending = self.columns[column].right if descending is None else descending
        self.refresh()
        self.post_message(self.Sorted(self))

    def select(self, key: str) -> None:
        """Put the cursor on a row."""
        self._cursor_key = key
        self.action_move(0)

    @property
    def cursor(self) -> int:
        return next((i for i, row in enumerate(self.rows) if row.key == self._cursor_key), 0)

    @property
    def selected(self) -> str | None:
        return self._cursor_key if self.rows else None

    # ------------------------------------------------------------------ keys and mouse

    def action_move(self, by: int) -> None:
        if not self.rows:
            return
        index = max(0, min(len(self.rows) - 1, self.cursor + by))
        self._cursor_key = self.rows[index].key
        self.post_message(self.Moved())
        self.refresh()
        room = max(1, self.size.height - 1)
        top = self.scroll_offset.y
        if index < top:
            self.scroll_to(y=index, animate=False, immediate=True)
        elif index >= top + room:
            self.scroll_to(y=index - room + 1, animate=False, immediate=True)

    def action_choose(self) -> None:
        if self.selected is not None:
            self.post_message(self.Chosen(self, self.selected))

    def on_click(self, event: object) -> None:
        x, y = getattr(event, "x", 0), getattr(event, "y", 0)
        if y == 0:
            self._click_header(x)
            return
        row = y - 1 + self.scroll_offset.y
        if 0 <= row < len(self.rows):
            self._cursor_key = self.rows[row].key
            self.refresh()
            self.action_choose()

    def _click_header(self, x: int) -> None:
        """Sort by the column at `x`; a second click turns the order, a third one ends it."""
        begin = 2
        for index, width in enumerate(self._widths()):
            end = begin + (width + 2 if width else 0)
            if begin <= x < end and self.columns[index].sortable and self.rows:
                first = self.columns[index].right
                if self.sort_column != index:
                    self.sort_by(index)
                elif self.descending == first:
                    self.sort_by(index, descending=not first)
                else:
                    self.sort_by(None)
            begin = end

    def on_resize(self) -> None:
        self.virtual_size = Size(self.size.width, len(self.rows) + 1)

    # ------------------------------------------------------------------ drawing

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if not self.rows:
            text = {0: "", 1: f"  {self.empty}"}.get(y, "")
            return self.strip_of(((fit(text, width, self.glyphs), "muted"),), width)
        if y == 0:
            return self.strip_of(self._line(self._titles(), " "), width, under="header")
        index = self.scroll_offset.y + y - 1
        if index >= len(self.rows):
            return Strip.blank(width, self.tones[""])
        row = self.rows[index]
        here = row.key == self._cursor_key
        marked = here and self.has_focus
        line = self._line(row.cells, self.glyphs.cursor if marked else " ", row.drawn)
        return self.strip_of(line, width, under="selected" if marked else None)

    def _titles(self) -> tuple[Span, ...]:
        arrow = self.glyphs.descending if self.descending else self.glyphs.ascending
        titles = [(column.title, "header") for column in self.columns]
        if self.sort_column is not None:
            column = self.columns[self.sort_column]
            has_room = not column.width or len(column.title) < column.width
            titles[self.sort_column] = (arrow + column.title if has_room else column.title, "accent")
        return tuple(titles)

    def _line(self, cells: Sequence[Span], mark: str, drawn: Mapping[int, Line] | None = None) -> Line:
        spans: list[Span] = [(mark + " ", "accent")]
        for index, (width, (text, tone)) in enumerate(zip(self._widths(), cells, strict=True)):
            column = self.columns[index]
            if width and drawn and index in drawn:
                spans += [*cut(drawn[index], width, self.glyphs), ("  ", "")]
            elif width:
                text = fit(text, width, self.glyphs, right=column.right, middle=column.middle)  # noqa: PLW2901
                spans.append((text + "  ", tone))
        return tuple(spans)

    def _widths(self) -> list[int]:
        """Return the column widths; where they do not fit, columns of the highest rank are hidden."""
        room = self.size.width - 3
        shown = set(range(len(self.columns)))

        def need() -> int:
            return sum((self.columns[i].width or self.columns[i].least) + 2 for i in shown)

        while need() > room and any(self.columns[i].rank for i in shown):
            shown.remove(max(shown, key=lambda i: self.columns[i].rank))
        left = room - sum(self.columns[i].width + 2 for i in shown)
        return [
            0 if i not in shown else column.width or max(4, left) for i, column in enumerate(self.columns)
        ]
