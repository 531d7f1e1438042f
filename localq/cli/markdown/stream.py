"""Markdown at a terminal while it streams: what is unfinished is seen as it is written, what has ended is drawn.

A block that has ended is drawn over its own rows: the cursor goes up to the first, and everything from there on is
erased. Only where all its rows are known to be still on the screen; else it stays as it was written. So whatever comes
amid it, nothing above it is touched. Lines of code are never broken and never moved: they get colours, no more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from localq.cli.markdown.split import Block, Code, Event, Opened, open_code
from localq.cli.markdown.terminal_rows import Cursor, Watch, rows_of, width_of
from localq.sanitize import sanitize

if TYPE_CHECKING:
    from localq.cli.markdown.rows import Renderer

# The beginning of a line that is not shown yet: blanks, marks of items, and a fence, which is never seen.
_HELD = re.compile(r"[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*(?:`{1,2}|`{3,}[^`]*|~{1,2}|~{3,}.*)?\Z")
_MOST_HELD = 200  # characters


class MarkdownStream:
    """Takes the text of a reply piece by piece, and writes it to a terminal of a known size.

    said   what was shown of the reply before: a block of code that is open there goes on
    """

    def __init__(self, stream: TextIO, watch: Watch, colour: bool, said: str = "") -> None:
        self._stream, self._watch, self._colour = stream, watch, colour
        self._drawn: Renderer | None = None  # once there is something to draw
        self._said: list[str] = []  # to be written with the next flush
        self._splitter, language = open_code(said)
        self._begun: list[str] = []  # the line that has begun, in pieces
        self._held: str | None = ""  # all of it, where none is shown yet
        self._gap = False  # an empty line is due
        self._cursor: Cursor | None = None  # of the block that is on the screen as it was written
        self._lost = False  # its rows are not known
        self._code = _Segment(language)
        self.is_empty = self._fresh = True  # nothing is shown; the cursor begins a row

    def write(self, text: str) -> None:
        """More of it."""
        if self._cursor is not None and not self._watch.is_as_it_was():
            self._lost = True
        first, *others = sanitize(text).split("\n")
        self._show(first)
        for each in others:
            self._end_line()
            self._show(each)
        self._flush()

    def end(self) -> None:
        """There is no more: what has not ended is drawn too. The cursor is at the beginning of a row."""
        if "".join(self._begun).strip(" \t"):
            self._end_line()
        for event in self._splitter.end():
            self._finish([event], "") if isinstance(event, Block) else self._colour_code()
        self._begun, self._held, self._gap = [], "", False
        self._flush()

    def _flush(self) -> None:
        said, self._said = "".join(self._said), []
        if said:
            self._stream.write(said)
            self._stream.flush()

    def _say(self, text: str) -> None:
        if text:
            self.is_empty, self._fresh = False, text.endswith("\n")
            self._said.append(text)

    # ---- lines

    def _show(self, piece: str) -> None:
        """A piece of a line."""
        if not piece:
            return
        self._begun.append(piece)
        if self._held is None:
            self._put(piece)
            return
        self._held += piece
        in_code = self._splitter.in_code
        may_be_fence = self._splitter.may_close(self._held) if in_code else bool(_HELD.match(self._held))
        if not may_be_fence or len(self._held) > _MOST_HELD:
            self._reveal()

    def _reveal(self) -> None:
        """Show what was held of a line."""
        held, self._held = self._held, None
        if held is not None:
            self._put(self._splitter.dedented(held) if self._splitter.in_code else held)

    def _put(self, text: str) -> None:
        """As it was written: code in rows that the terminal breaks, all else in rows that are counted."""
        if self._splitter.in_code:
            self._say(text)
            return
        if self._cursor is None:
            self._start_block()
        assert self._cursor is not None
        self._say(text if self._lost else self._cursor.broken(text))

    def _end_line(self) -> None:
        """A line has ended."""
        line, in_code = "".join(self._begun), self._splitter.in_code
        if in_code and not self._splitter.closes(line):
            self._reveal()
            self._say("\n")
        events = self._splitter.line(line)
        if in_code:
            self._take_code(events[0])
        elif events:
            self._finish(events, line)
        elif self._splitter.raw:
            self._reveal()
            self._put("\n")
        self._gap = not self.is_empty and not self._splitter.in_code and (in_code or self._gap or not line.strip(" \t"))
        self._begun, self._held = [], ""

    # ---- blocks

    def _start_block(self) -> None:
        """What is written from here on may be drawn over."""
        if self._gap:
            self._say("\n")
        self._gap = self._lost = False
        self._watch.begin()
        self._cursor = Cursor(self._watch.size.columns if self._watch.size is not None else 80)

    def _finish(self, events: list[Event], line: str) -> None:
        """Blocks have ended with `line`, or before it."""
        opened = next((each for each in events if isinstance(each, Opened)), None)
        blocks = [each for each in events if isinstance(each, Block)]
        if self._cursor is None:
            self._gap = self._gap or (opened is not None and not blocks and not self.is_empty)
            self._start_block()
        assert self._cursor is not None
        if self._is_known():
            self._held = None
            if self._cursor.row or self._cursor.column:
                self._say(_over(self._cursor.row))
            for block in blocks:
                self._say(self._drawing(block))
            self._cursor = None
            if self._splitter.raw:  # of this line alone
                self._put("".join(f"{each}\n" for each in self._splitter.raw))
        else:
            if not opened:
                self._reveal()
            if not self._fresh:
                self._say("\n")
            self._lost = bool(self._splitter.raw)
            self._cursor = self._cursor if self._lost else None
        if opened is not None:  # an empty row before it, and one behind: nothing else parts it from the rest
            self._say("\n" if blocks else "")
            self._code = _Segment(opened.language)
            self._watch.begin()

    def _is_known(self) -> bool:
        """All rows of the block are on the screen, where they were written."""
        size = self._watch.size
        if self._lost or size is None or self._cursor is None or self._cursor.row >= size.lines - 1:
            return False
        return self._watch.is_as_it_was()

    def _drawing(self, block: Block) -> str:
        assert self._watch.size is not None
        rows = self._renderer().rows(block, width_of(self._watch.size))
        return "".join(f"{row}\n" for row in rows or [block.raw])

    def _renderer(self) -> Renderer:
        if self._drawn is None:
            from localq.cli.markdown.rows import Renderer  # start-up cost: not before something is drawn

            self._drawn = Renderer(self._colour)
        return self._drawn

    # ---- code

    def _take_code(self, event: Event) -> None:
        if isinstance(event, Code):
            size = self._watch.size
            self._code.add(event.text, rows_of(event.text, size.columns) if size is not None else None)
            if size is None or self._code.height < size.lines // 2:
                return
        self._colour_code()

    def _colour_code(self) -> None:
        """Draw the lines since the last time over themselves."""
        code, size = self._code, self._watch.size
        self._code = code.next()
        if self._colour and code.rows and size is not None and code.rows < size.lines - 1:
            drawn = self._renderer().code(code.lines, code.language, code.before)
            if drawn is not None and self._watch.is_as_it_was():
                self._say(_over(code.rows) + "".join(f"{row}\n" for row in drawn))
        self._watch.begin()


@dataclass
class _Segment:
    """Lines of code that are on the screen as they were written, behind those `before`.

    rows     that they take; None = not known
    height   at least so many
    """

    language: str = ""
    before: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    rows: int | None = 0
    height: int = 0

    def add(self, line: str, rows: int | None) -> None:
        """One more."""
        self.lines.append(line)
        self.rows = None if self.rows is None or rows is None else self.rows + rows
        self.height += rows or 1

    def next(self) -> _Segment:
        """What comes behind it."""
        return _Segment(self.language, self.lines)


def _over(rows: int) -> str:
    """To the first of the rows above the cursor's, and nothing is there any more."""
    return "\r" + (f"\x1b[{rows}A" if rows else "") + "\x1b[J"
