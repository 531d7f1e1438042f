"""The table of the model picker, and its filter field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual import events, on
from textual.binding import Binding
from textual.message import Message
from textual.widgets import DataTable, Input

from localq.sanitize import sanitize
from localq.tui.keys import bindings
from localq.tui.models.picker_rows import COLUMNS, ORDERS, RIGHT, PickerRow

_BEST, _NAME, _FAST, _CONTEXT, _LARGE = ORDERS
_ORDER_OF = {"MODEL": _NAME, "CONTEXT": _CONTEXT, "TOK/S": _FAST, "WHERE": _LARGE}  # others: best first
_GOES_FIRST = (
    "WHEN FULL",
    "WHERE",
    "FORMAT",
    "SCORE",
    "CONTEXT",
    "TOK/S",
    "VERDICT",
)  # order in which columns are dropped; columns without figures go before these
_NAME_CELLS = 16  # names are cut to this before a column is dropped


class FilterInput(Input):
    """The filter; the arrow keys lead to the table."""

    BINDINGS: ClassVar = [
        Binding("enter", "submit", "Open"),  # as in every field
        *bindings("picker_list", of="screen."),
    ]

    def __init__(self, **options: Any) -> None:
        super().__init__(placeholder="Filter, or ORG/REPO, folder, .gguf", select_on_focus=False, **options)


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
        self.rows_shown: list[PickerRow] = []
        self._stands_on = ""

    @property
    def row(self) -> PickerRow | None:
        """The row under the cursor."""
        return self.rows_shown[self.cursor_row] if 0 <= self.cursor_row < len(self.rows_shown) else None

    def show(self, rows: Sequence[PickerRow]) -> None:
        """Show rows; the cursor stays on its model, or on the first row if it was never moved."""
        before = self.row.name if self.row is not None and self.cursor_row else ""
        self.rows_shown = list(rows)
        self.clear(columns=True)
        lines = [
            [_cell(cell, place) for place, cell in enumerate(each)] for each in (COLUMNS, *(r.cells for r in rows))
        ]
        # Computed here, because the table measures new cells only after drawing them.
        columns = list(zip(*lines, strict=True))
        with_figures = {
            title for title, column in zip(COLUMNS, columns, strict=True) if {"-"} != {c.plain for c in column[1:]}
        }
        goes_first = sorted(_GOES_FIRST, key=lambda title: title in with_figures)
        widths = _widths([max(cell.cell_len for cell in column) for column in columns], goes_first, self._room())
        for place, width in widths.items():
            self.add_column(lines[0][place], key=COLUMNS[place], width=width)
        for line in lines[1:]:
            line[0].truncate(widths[0], overflow="ellipsis")
            self.add_row(*(line[place] for place in widths))
        at = next((place for place, row in enumerate(rows) if row.name == before), 0)
        self.move_cursor(row=at, animate=False)
        self._stands_on = self.row.name if self.row is not None else ""

    def _room(self) -> int:
        """Cells of a row without the scrollbar."""
        return (self.size.width or self.app.size.width) - self.styles.scrollbar_size_vertical

    def on_resize(self, event: events.Resize) -> None:
        """Choose columns for the new width."""
        if event.size.width:
            self.show(self.rows_shown)

    def action_cursor_up(self) -> None:
        """Move up; from the first row to the filter."""
        if self.cursor_row == 0:
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
