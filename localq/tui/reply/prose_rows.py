"""Blocks of a reply as rows of cells at a width; styles are looked up when a row is drawn.

Layout and selection are those of Textual's Markdown widgets (8.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rich.cells import cell_len
from textual._resolve import resolve
from textual.content import Content, _FormattedLine
from textual.css.scalar import Scalar
from textual.geometry import Offset, Size
from textual.selection import Selection
from textual.style import Style

from localq.text.markdown.blocks import ListBlock, QuoteBlock, RuleBlock, TableBlock, TextBlock
from localq.tui.reply.prose_blocks import ProseBlock, ProseText

MARGINS = {"h1": (2, 1), "h2": (2, 1), "h3": (1, 1), "h4": (1, 1), "h5": (1, 1), "h6": (1, 1)}  # lines above, below
TOP, MIDDLE, BOTTOM = ("┌", "┬", "┐"), ("├", "┼", "┤"), ("└", "┴", "┘")


class Cell(NamedTuple):
    """Part of a row. width: columns; names: its styles, outermost first; line: its text."""

    width: int
    names: tuple[str, ...]
    line: _FormattedLine | Content | str = ""


Row = list[Cell]


def margin(block: ProseBlock, is_top: bool = True) -> tuple[int, int]:
    """Empty lines above and below a block. is_top: a top-level block."""
    if isinstance(block, TextBlock):
        return MARGINS.get(block.kind, (0, int(is_top)))
    if isinstance(block, QuoteBlock):
        return 1, 1
    return 0, 0 if isinstance(block, ListBlock) and block.nested else 1


def takes_mark(selection: Selection | None, line: int) -> bool:
    """Return whether a line's mark is selected with it, because the selection begins above the line."""
    if selection is None or selection.get_span(line) is None:
        return False
    return selection.start is None or selection.start.y < line


class Breaker:
    """Breaks blocks into rows. lines_of_text: lines of their text, each with the mark before it."""

    def __init__(
        self, get_style: Callable[[str | Style], Style], selection: Selection | None, selected: Style | None
    ) -> None:
        self.lines_of_text: list[tuple[str, str]] = []
        self._get_style, self._selection, self._selected = get_style, selection, selected
        self._mark = ""  # of an item, until its text

    def rows(self, blocks: Sequence[ProseBlock], width: int) -> list[Row]:
        """Rows of top-level blocks, without the outer margins."""
        return self._stacked(blocks, width, (), is_top=True)

    def _stacked(
        self, blocks: Sequence[ProseBlock], width: int, names: tuple[str, ...], is_top: bool = False
    ) -> list[Row]:
        if not blocks:
            return []
        empty = [Cell(width, names)]
        margins = [margin(block, is_top) for block in blocks]
        rows = [] if is_top else [empty] * margins[0][0]
        gaps = [max(above[1], below[0]) for above, below in pairwise(margins)]
        for block, gap in zip(blocks, [*gaps, 0 if is_top else margins[-1][1]], strict=True):
            rows += self._block(block, width, names)
            rows += [empty] * gap
        return rows

    def _block(self, block: ProseBlock, width: int, names: tuple[str, ...]) -> list[Row]:
        match block:
            case TextBlock():
                return self._text(block, width, names)
            case ListBlock():
                return [row for mark, within in block.items for row in self._item(mark, within, width, names)]
            case QuoteBlock():
                names = (*names, "quote")
                bar, pad = Cell(1, (*names, "quote-bar"), "▌"), Cell(1, names)
                return [[bar, pad, *row, pad] for row in self._stacked(block.blocks, max(1, width - 3), names)]
            case TableBlock():
                return self._table(block, width, (*names, "table"))
            case RuleBlock():
                return [[Cell(width, names)], [Cell(width, (*names, "rule"), "─" * width)]]

    def _text(self, block: ProseText, width: int, names: tuple[str, ...]) -> list[Row]:
        lines = self._lines(block.content, width)
        if block.kind == "paragraph":
            return [[Cell(width, names, line)] for line in lines]
        names_here = (*names, block.kind)
        longest = min(width, max(line.content.cell_length for line in lines))
        if block.kind == "h3":  # only as wide as its text
            return [[Cell(longest, names_here, line), Cell(width - longest, names)] for line in lines]
        left = (width - longest) // 2 if block.kind == "h1" else 0
        return [[Cell(left, names_here), Cell(width - left, names_here, line)] for line in lines]

    def _lines(self, content: Content, width: int, overflow: Any = "fold") -> list[_FormattedLine]:
        first = len(self.lines_of_text)
        marks = [self._mark, *[""] * content.plain.count("\n")]
        self.lines_of_text += zip(marks, content.plain.split("\n"), strict=True)
        self._mark = ""
        lines = content._wrap_and_format(
            max(1, width),
            overflow=overflow,
            selection=_from(self._selection, first),
            selection_style=self._selected,
            get_style=self._get_style,
        )
        for line in lines:
            line.y += first
        return lines

    def _item(self, mark: str, blocks: Sequence[ProseBlock], width: int, names: tuple[str, ...]) -> list[Row]:
        columns = cell_len(mark)
        self._mark = f"{mark} "
        shown = Content(mark)
        if self._selected is not None and takes_mark(self._selection, len(self.lines_of_text)):
            shown = shown.stylize(self._selected)
        rows = self._stacked(blocks, max(1, width - columns), names)  # an empty item is not shown
        first, empty = Cell(columns, (*names, "bullet"), shown), Cell(columns, names)
        return [[first if row is rows[0] and at == 0 else empty, *row] for at, row in enumerate(rows)]

    def _table(self, table: TableBlock[Content], width: int, names: tuple[str, ...]) -> list[Row]:
        columns = _columns(table, width)

        def line(corners: tuple[str, str, str]) -> Row:
            left, middle, right = corners
            drawn = left + middle.join("─" * column for column in columns) + right
            return [Cell(width, (*names, "grid"), drawn)]

        bar = Cell(1, (*names, "grid"), "│")
        rows = [line(TOP)]
        for number, cells in enumerate(table.rows):
            here = names if number else (*names, "heading")
            broken = [
                self._lines(cell.content, column - 2, "ellipsis")[: None if column > 2 else 0]
                for cell, column in zip(cells, columns, strict=True)
            ]
            height = max(map(len, broken))
            for at in range(height):
                row = [bar]
                for lines, column in zip(broken, columns, strict=True):
                    place = at if number else at - (height - len(lines))  # a heading is aligned to the bottom
                    shown = lines[place] if 0 <= place < len(lines) else ""
                    within = [Cell(1, here), Cell(column - 2, here, shown), Cell(1, here)]
                    row += [*(within if column > 2 else [Cell(column, here)]), bar]
                rows.append(row)
            rows.append(line(MIDDLE if number + 1 < len(table.rows) else BOTTOM))
        return rows


def _columns(table: TableBlock[Content], width: int) -> list[int]:
    """Widths of the columns, with a blank at either side, as Textual's grid computes them."""
    contents = [[row[place].content for row in table.rows] for place in range(len(table.rows[0]))]
    wished = [max(each.get_optimal_width({}, width) for each in column) + 2 for column in contents]
    least = [max(each.get_minimal_width({}) for each in column) + 2 for column in contents]
    size, viewport = Size(width - 2, 0), Size(width, 0)
    scalars = [Scalar.from_number(each) for each in wished]
    found = resolve(scalars, width - 2, 1, size, viewport, expand=True, shrink=True, minimums=least)
    return [column for _, column in found]


def _from(selection: Selection | None, line: int) -> Selection | None:
    """The selection relative to a text that begins at `line`."""
    if selection is None:
        return None
    moved = [None if each is None else Offset(each.x, each.y - line) for each in selection]
    return Selection(*moved)
