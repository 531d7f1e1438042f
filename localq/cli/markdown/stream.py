"""Streams Markdown to a terminal: the open block is shown raw, a finished block is redrawn.

A finished block is drawn over its own rows: the cursor moves up to the first, and everything below is erased. This
happens only if all rows are certainly still on the screen; otherwise the block stays raw, and nothing above it is
touched. Lines of code are never wrapped or moved, they only get colours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from localq.cli.markdown.terminal_rows import Cursor, TerminalWatch, rows_of, width_of
from localq.sanitize import sanitize
from localq.text.markdown.split import CodeLine, Event, FenceStart, FlatBlock, open_code

if TYPE_CHECKING:
    from localq.cli.markdown.rows import Renderer

# The start of a line that is not shown yet: blanks, list markers, and a fence, which is never shown.
_HELD = re.compile(r"[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*(?:`{1,2}|`{3,}[^`]*|~{1,2}|~{3,}.*)?\Z")
_MOST_HELD = 200  # characters


class MarkdownStream:
    """Writes a reply piece by piece to a terminal of known size.

    previous   the part of the reply shown before: a code block open there continues
    """

    def __init__(self, stream: TextIO, watch: TerminalWatch, colour: bool, previous: str = "") -> None:
        self._stream, self._watch, self._colour = stream, watch, colour
        self._drawn: Renderer | None = None  # created at the first block
        self._output: list[str] = []  # written at the next flush
        self._splitter, language = open_code(previous)
        self._begun: list[str] = []  # pieces of the open line
        self._held: str | None = ""  # the open line while none of it is shown
        self._gap = False  # an empty line is due
        self._cursor: Cursor | None = None  # of the raw block on the screen
        self._lost = False  # the rows of the block are unknown
        self._code = _RawCode(language)
        self.is_empty = self._fresh = True  # nothing shown yet; the cursor is at the start of a row

    def write(self, text: str) -> None:
        """Print the next piece."""
        if self._cursor is not None and not self._watch.is_unchanged():
            self._lost = True
        first, *others = sanitize(text).split("\n")
        self._show(first)
        for each in others:
            self._end_line()
            self._show(each)
        self._flush()

    def end(self) -> None:
        """End the reply: draw the open block and move the cursor to the start of a row."""
        if "".join(self._begun).strip(" \t"):
            self._end_line()
        for event in self._splitter.end():
            self._finish([event], "") if isinstance(event, FlatBlock) else self._colour_code()
        self._begun, self._held, self._gap = [], "", False
        self._flush()

    def _flush(self) -> None:
        text, self._output = "".join(self._output), []
        if text:
            self._stream.write(text)
            self._stream.flush()

    def _emit(self, text: str) -> None:
        if text:
            self.is_empty, self._fresh = False, text.endswith("\n")
            self._output.append(text)

    # ---- lines

    def _show(self, piece: str) -> None:
        """Take a piece of a line."""
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
        """Show the held part of the line."""
        held, self._held = self._held, None
        if held is not None:
            self._put(self._splitter.dedent(held) if self._splitter.in_code else held)

    def _put(self, text: str) -> None:
        """Print raw text: code wrapped by the terminal, the rest in counted rows."""
        if self._splitter.in_code:
            self._emit(text)
            return
        if self._cursor is None:
            self._start_block()
        assert self._cursor is not None
        self._emit(text if self._lost else self._cursor.wrap(text))

    def _end_line(self) -> None:
        """End the line."""
        line, in_code = "".join(self._begun), self._splitter.in_code
        if in_code and not self._splitter.closes(line):
            self._reveal()
            self._emit("\n")
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
        """Start a block that will be redrawn."""
        if self._gap:
            self._emit("\n")
        self._gap = self._lost = False
        self._watch.begin()
        self._cursor = Cursor(self._watch.size.columns if self._watch.size is not None else 80)

    def _finish(self, events: list[Event], line: str) -> None:
        """Draw the blocks that ended with `line` or before it."""
        opened = next((each for each in events if isinstance(each, FenceStart)), None)
        blocks = [each for each in events if isinstance(each, FlatBlock)]
        if self._cursor is None:
            self._gap = self._gap or (opened is not None and not blocks and not self.is_empty)
            self._start_block()
        assert self._cursor is not None
        if self._is_known():
            self._held = None
            if self._cursor.row or self._cursor.column:
                self._emit(_over(self._cursor.row))
            for block in blocks:
                self._emit(self._drawing(block))
            self._cursor = None
            if self._splitter.raw:  # of this line alone
                self._put("".join(f"{each}\n" for each in self._splitter.raw))
        else:
            if not opened:
                self._reveal()
            if not self._fresh:
                self._emit("\n")
            self._lost = bool(self._splitter.raw)
            self._cursor = self._cursor if self._lost else None
        if opened is not None:  # an empty row before and after separates the code
            self._emit("\n" if blocks else "")
            self._code = _RawCode(opened.language)
            self._watch.begin()

    def _is_known(self) -> bool:
        """Return whether all rows of the block are still on the screen."""
        size = self._watch.size
        if self._lost or size is None or self._cursor is None or self._cursor.row >= size.lines - 1:
            return False
        return self._watch.is_unchanged()

    def _drawing(self, block: FlatBlock) -> str:
        assert self._watch.size is not None
        rows = self._renderer().rows(block, width_of(self._watch.size))
        return "".join(f"{row}\n" for row in rows or [block.raw])

    def _renderer(self) -> Renderer:
        if self._drawn is None:
            from localq.cli.markdown.rows import Renderer  # start-up cost: needed at the first block

            self._drawn = Renderer(self._colour)
        return self._drawn

    # ---- code

    def _take_code(self, event: Event) -> None:
        if isinstance(event, CodeLine):
            size = self._watch.size
            self._code.add(event.text, rows_of(event.text, size.columns) if size is not None else None)
            if size is None or self._code.height < size.lines // 2:
                return
        self._colour_code()

    def _colour_code(self) -> None:
        """Redraw the latest lines of code in colour."""
        code, size = self._code, self._watch.size
        self._code = code.next()
        if self._colour and code.rows and size is not None and code.rows < size.lines - 1:
            drawn = self._renderer().code(code.lines, code.language, code.before)
            if drawn is not None and self._watch.is_unchanged():
                self._emit(_over(code.rows) + "".join(f"{row}\n" for row in drawn))
        self._watch.begin()


@dataclass
class _RawCode:
    """Raw lines of code on the screen, after the lines `before`.

    rows     rows that they take; None = unknown
    height   a lower bound of rows
    """

    language: str = ""
    before: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    rows: int | None = 0
    height: int = 0

    def add(self, line: str, rows: int | None) -> None:
        """Add a line."""
        self.lines.append(line)
        self.rows = None if self.rows is None or rows is None else self.rows + rows
        self.height += rows or 1

    def next(self) -> _RawCode:
        """The segment that follows."""
        return _RawCode(self.language, self.lines)


def _over(rows: int) -> str:
    """Escape sequence: move up `rows` rows and erase everything below."""
    return "\r" + (f"\x1b[{rows}A" if rows else "") + "\x1b[J"
