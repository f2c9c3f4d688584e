"""Table of fixed column widths that draws only visible lines, and redraws only those that changed.

Textual's DataTable measures and keeps every cell; at a hundred live rows a second this one costs a tenth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ..rendering import Line, Span, fit
from .lines import LineWidget, cut


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
    """Fewest cells of a column that takes the remaining space."""
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
            return self.strip_of(self._line(self._titles(), " "), width)
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
