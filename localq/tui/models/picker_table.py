"""The table of the model picker, and its filter field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text
from textual import events, on
from textual.binding import Binding
from textual.coordinate import Coordinate
from textual.message import Message
from textual.widgets import DataTable, Input

from localq.sanitize import sanitize
from localq.tui.gauge import BAD, FAIR, GOOD, REST_STYLE, gauge, rich_style, rising
from localq.tui.keys import bindings
from localq.tui.models.picker_rows import (
    COLOURS,
    COLUMNS,
    ORDERS,
    OVERSIZE,
    RIGHT,
    UNSUPPORTED,
    PickerRow,
)  # fmt: skip

_BEST, _NAME, _FAST, _CONTEXT, _LARGE = ORDERS
_ORDER_OF = {"MODEL": _NAME, "CONTEXT": _CONTEXT, "TOK/S": _FAST, "WHERE": _LARGE}  # others: best first
_GOES_FIRST = (
    "WHEN FULL",
    "FORMAT",
    "SCORE",
    "WHERE",
    "MEMORY",
    "CONTEXT",
    "TOK/S",
    "VERDICT",
)  # order in which columns are dropped; columns without figures go before these
_NAME_CELLS = 16  # names are cut to this before a column is dropped
_MEMORY = COLUMNS.index("MEMORY")
_VERDICT = COLUMNS.index("VERDICT")
_GAUGE_CELLS = 8
_MARKS = {"": "·", GOOD: "●", FAIR: "◐", BAD: "○"}  # by colour
_FAIR, _BAD = 0.9, 1.0  # of the memory that there is


class FilterInput(Input):
    """The filter; the arrow keys lead to the table."""

    BINDINGS: ClassVar = [
        Binding("enter", "submit", "Open"),  # as in every field
        *bindings("picker_list", of="screen."),
    ]

    def __init__(self, **options: Any) -> None:
        super().__init__(placeholder="Filter, or enter ORG/REPO, folder, .gguf", select_on_focus=False, **options)


class ModelTable(DataTable[Text]):
    """The rows. A click moves the cursor, a double click opens, a click on a heading sorts."""

    BINDINGS: ClassVar = [
        *bindings("picker_open"),
        *bindings("picker_pull", "picker_delete", "picker_details", "picker_sort", "picker_every", of="screen."),
        *bindings("picker_filter", "picker_force", of="screen."),
    ]

    class Opened(Message):
        """Open the row under the cursor."""

    class Moved(Message):
        """The cursor is on another row."""

    class SortedBy(Message):
        """A heading was clicked."""

        def __init__(self, order: str) -> None:
            super().__init__()
            self.order = order

    def __init__(self, **options: Any) -> None:
        super().__init__(cursor_type="row", zebra_stripes=False, **options)
        self._lines: list[PickerRow | str] = []  # rows, and names of groups
        self._stands_on = ""

    @property
    def rows_shown(self) -> list[PickerRow]:
        """The rows, without the names of groups."""
        return [each for each in self._lines if not isinstance(each, str)]

    @property
    def row(self) -> PickerRow | None:
        """The row under the cursor."""
        found = self._lines[self.cursor_row] if 0 <= self.cursor_row < len(self._lines) else None
        return self._lines[self.cursor_row + 1] if isinstance(found, str) else found  # type: ignore[return-value]

    @property
    def _is_on_first(self) -> bool:
        """True if the cursor is on the first row, or on the name of its group."""
        return not any(isinstance(each, PickerRow) for each in self._lines[: self.cursor_row])

    def validate_cursor_coordinate(self, value: Coordinate) -> Coordinate:
        """As Textual's, but the name of a group is passed over."""
        value = super().validate_cursor_coordinate(value)
        if value.row >= len(self._lines) or not isinstance(self._lines[value.row], str):
            return value
        is_up = value.row < self.cursor_row and value.row > 0
        return Coordinate(value.row - 1 if is_up else min(value.row + 1, len(self._lines) - 1), value.column)

    def show(self, lines: Sequence[PickerRow | str]) -> None:
        """Show rows and names of groups; the cursor stays on its model, or on the first row if it was never moved."""
        before = self.row.name if self.row is not None and not self._is_on_first else ""
        self._lines = list(lines)
        rows = self.rows_shown
        self.clear(columns=True)
        cells = {id(row): self._cells(row) for row in rows}
        titles = [Text(title, justify="right" if place in RIGHT else "left") for place, title in enumerate(COLUMNS)]
        # Computed here, because the table measures new cells only after drawing them.
        columns = list(zip(titles, *cells.values(), strict=True))
        with_figures = {
            title for title, column in zip(COLUMNS, columns, strict=True) if {"-"} != {c.plain for c in column[1:]}
        }
        goes_first = sorted(_GOES_FIRST, key=lambda title: title in with_figures)
        widths = _widths([max(cell.cell_len for cell in column) for column in columns], goes_first, self._room())
        for place, width in widths.items():
            self.add_column(titles[place], key=COLUMNS[place], width=width)
        for each in self._lines:
            line = self._heading(each) if isinstance(each, str) else cells[id(each)]
            line[0].truncate(widths[0], overflow="ellipsis")
            self.add_row(*(line[place] for place in widths))
        places = {row.name: place for place, row in enumerate(self._lines) if isinstance(row, PickerRow)}
        self.move_cursor(row=places.get(before, min(places.values(), default=0)), animate=False)
        self._stands_on = self.row.name if self.row is not None else ""

    def _heading(self, name: str) -> list[Text]:
        return [Text(name, self._colour("accent", bold=True)), *(Text() for _ in COLUMNS[1:])]

    def _cells(self, row: PickerRow) -> list[Text]:
        """The cells of a row: the verdict with a mark, the memory with a gauge."""
        found = [_cell(text, place) for place, text in enumerate(row.cells)]
        colour = COLOURS.get(row.verdict, "")
        found[_VERDICT] = Text.assemble((f"{_MARKS[colour]} ", self._colour(colour.removeprefix("$"))), found[_VERDICT])
        if row.share is not None:
            drawn = gauge(row.share, _GAUGE_CELLS, rising(row.share, _FAIR, _BAD))
            bar = [(text, self._colour(style.removeprefix("$")) if style != REST_STYLE else Style(dim=True))
                   for text, style in drawn]  # fmt: skip
            found[_MEMORY] = Text.assemble(*bar, f" {found[_MEMORY].plain:>8}")
        if row.group in (OVERSIZE, UNSUPPORTED):
            for each in found:
                each.stylize(Style(dim=True))
        return found

    def _colour(self, name: str, bold: bool = False) -> Style:
        return rich_style(self.app, name, bold)

    def _room(self) -> int:
        """Cells of a row without the scrollbar."""
        return (self.size.width or self.app.size.width) - self.styles.scrollbar_size_vertical

    def on_resize(self, event: events.Resize) -> None:
        """Choose columns for the new width."""
        if event.size.width:
            self.show(self._lines)

    def action_cursor_up(self) -> None:
        """Move up; from the first row to the filter."""
        if self._is_on_first:
            self.screen.query_one(FilterInput).focus()
        else:
            super().action_cursor_up()

    def action_open(self) -> None:
        """Open the row."""
        self.post_message(self.Opened())

    def on_click(self, event: events.Click) -> None:
        """A double click opens."""
        if event.chain == 2 and event.style.meta.get("row", -1) >= 0:
            self.post_message(self.Opened())

    @on(DataTable.RowHighlighted)
    def _highlighted(self, message: DataTable.RowHighlighted) -> None:
        message.stop()
        name = self.row.name if self.row is not None else ""
        if name != self._stands_on:  # not after a redraw
            self._stands_on = name
            self.post_message(self.Moved())

    @on(DataTable.RowSelected)
    def _selected(self, message: DataTable.RowSelected) -> None:
        message.stop()  # a click only moves the cursor

    @on(DataTable.HeaderSelected)
    def _sort(self, message: DataTable.HeaderSelected) -> None:
        message.stop()
        self.post_message(self.SortedBy(_ORDER_OF.get(str(message.label), _BEST)))


def _widths(wanted: list[int], goes_first: Sequence[str], room: int) -> dict[int, int]:
    """Column -> width for those that fit into `room`: all, or the most important ones with names cut."""
    places = list(range(len(wanted)))
    for title in (None, *goes_first):
        places = [place for place in places if COLUMNS[place] != title]
        for_name = room - 2 * len(places) - sum(wanted[place] for place in places[1:])  # with a blank on either side
        if for_name >= min(wanted[0], _NAME_CELLS):
            break
    return {place: wanted[place] if place else max(1, min(wanted[0], for_name)) for place in places}


def _cell(text: str, place: int) -> Text:
    return Text(sanitize(text).replace("\n", " "), justify="right" if place in RIGHT else "left", no_wrap=True)
