"""Splits a streaming reply into Markdown blocks, line by line; a block can be drawn once it ends.

Block structure of CommonMark 0.31.2 and GFM tables, flattened: a list item is a block with a marker before its first
row, and its continuation is indented. Blocks stay short in long lists, and every line is read once. Unlike CommonMark,
a fence ends only at its closing line, whatever the indentation, as models intend.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FENCE = re.compile(r"(`{3,})([^`]*)\Z|(~{3,})(.*)\Z")
_HEADING = re.compile(r"#{1,6}(?:[ \t]|\Z)")
_UNDERLINE = re.compile(r"(?:=+|-+)[ \t]*\Z")
_RULE = re.compile(r"(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})\Z")
_ITEM = re.compile(r"(?:[-*+]|(\d{1,9})([.)]))(?=[ \t]|\Z)")
_CODE = 4  # indentation that makes a line code
_TAB = 4
_NOWHERE = 10**9  # an indentation that no line has
_DEEPEST = 20  # nested lists; deeper ones are text


@dataclass(frozen=True)
class FlatBlock:
    """A finished block, without the indentation of its lists.

    raw           the original text
    first, rest   prefix of its first row and of the others: list markers, blanks
    """

    source: str
    raw: str = ""
    first: str = ""
    rest: str = ""


@dataclass(frozen=True)
class FenceStart:
    """An opening fence; `language` is its first word."""

    language: str


@dataclass(frozen=True)
class CodeLine:
    """A line of code inside a fence."""

    text: str


@dataclass(frozen=True)
class FenceEnd:
    """A closing fence."""


Event = FlatBlock | FenceStart | CodeLine | FenceEnd


@dataclass(frozen=True)
class _Item:
    """A list item: its lines are indented by `offset`, `mark` precedes the first."""

    offset: int
    mark: str
    ends: str = ""  # of a number: . or )
    number: int = 0


@dataclass(frozen=True)
class _Fence:
    mark: str
    indent: int


class BlockSplitter:
    """Takes lines, returns finished blocks. `raw`: lines of the open block."""

    def __init__(self) -> None:
        self.raw: list[str] = []
        self._lines: list[str] = []  # of the open block, without list indentation
        self._kind = ""  # "text", "quote" or "indented"
        self._items: list[_Item] = []
        self._marks = 0  # innermost items whose marker is not shown yet
        self._fence: _Fence | None = None

    @property
    def in_code(self) -> bool:
        """True if a fence is open."""
        return self._fence is not None

    def dedent(self, line: str) -> str:
        """A line of code without the indentation of its fence."""
        return "" if self._fence is None else _without(line, self._fence.indent)

    def may_close(self, begun: str) -> bool:
        """Return whether the start of a line may become a closing fence."""
        assert self._fence is not None
        body = begun.strip(" \t")
        return not body.strip(self._fence.mark[0]) and _indent(begun) < self._fence.indent + _CODE

    def closes(self, line: str) -> bool:
        """Return whether this line closes the fence."""
        return self._fence is not None and self.may_close(line) and line.strip(" \t").startswith(self._fence.mark)

    def line(self, line: str) -> list[Event]:
        """Take one line, without its newline; returns what it ends."""
        if self._fence is not None:
            if self.closes(line):
                self._fence = None
                return [FenceEnd()]
            return [CodeLine(self.dedent(line))]
        if not line.strip(" \t"):
            if self._lines == [""]:  # an item that starts with two empty lines ends there
                self._items[-1:] = [_Item(_NOWHERE, self._items[-1].mark)]
            return self._ended()
        depth, rest = self._place(line)
        if not self._starts(rest, depth):
            if self._lines:
                self._add(line, rest)
                return []
            del self._items[depth:]
            self._begin("indented" if _indent(rest) >= _CODE else "text", line, rest)
            return []
        if self._kind == "text" and _UNDERLINE.match(rest.strip(" \t")) and depth == len(self._items):
            self._add(line, rest)
            return self._ended()
        return self._begun(line, depth, rest)

    def end(self) -> list[Event]:
        """End the text."""
        if self._fence is None:
            return self._ended()
        self._fence = None
        return [FenceEnd()]

    def _place(self, line: str) -> tuple[int, str]:
        """Number of list items that the line belongs to, and its content there."""
        depth, rest = 0, line
        for item in self._items:
            if _indent(rest) < item.offset:
                break
            depth, rest = depth + 1, _without(rest, item.offset)
        return depth, rest

    def _starts(self, rest: str, depth: int) -> bool:
        """Return whether this line starts a new block."""
        within = depth == len(self._items)
        if _indent(rest) >= _CODE:
            return self._kind == "indented" and not within
        body = rest.strip(" \t")
        if body.startswith(">"):
            return self._kind != "quote" or not within
        if self._kind == "text" and within and _UNDERLINE.match(body):
            return True
        if _FENCE.match(body) or _HEADING.match(body) or _RULE.match(body):
            return True
        if (item := _ITEM.match(body)) and depth < _DEEPEST:
            in_paragraph = self._kind == "text" and within and self._lines
            return not in_paragraph or (item.end() < len(body) and item[1] in (None, "1"))
        return self._kind == "indented" or (self._lines == [""] and not within)  # an empty item does not continue

    def _begun(self, line: str, depth: int, rest: str) -> list[Event]:
        """End the open block and start the blocks of this line."""
        events = self._ended()
        before = self._items[depth] if depth < len(self._items) else None
        del self._items[depth:]
        while True:
            body = rest.strip(" \t")
            if _indent(rest) >= _CODE:
                self._begin("indented", line, rest)
                return events
            if fence := _FENCE.match(body):
                if self._marks:  # a row of its own
                    events.append(FlatBlock("", line, *self._prefixes()))
                self._fence = _Fence(fence[1] or fence[3], sum(item.offset for item in self._items) + _indent(rest))
                language = (fence[2] or fence[4] or "").split()
                return [*events, FenceStart(language[0] if language else "")]
            is_rule = _RULE.match(body)
            if not is_rule and (found := _ITEM.match(body)) and len(self._items) < _DEEPEST:
                rest = self._item(rest, found, before)
                before = None
                if rest.strip(" \t"):
                    continue
                self._begin("text", line, "")
                return events
            self._begin("quote" if body.startswith(">") else "text", line, rest)
            return [*events, *self._ended()] if is_rule or _HEADING.match(body) else events

    def _item(self, rest: str, found: re.Match[str], before: _Item | None) -> str:
        """Start a list item; returns its content. before: the previous item, if any."""
        indent = _indent(rest)
        behind = _expand_tabs(rest)[indent + found.end() :]
        blanks = len(behind) - len(behind.lstrip(" "))
        gap = blanks if 1 <= blanks <= _CODE and behind.strip() else 1
        number = int(found[1] or 0)
        if found[1] and before is not None and before.ends == found[2]:
            number = before.number + 1
        mark = f"{number}{found[2]} " if found[1] else "• "
        self._items.append(_Item(indent + found.end() + gap, mark, found[2] or "", number))
        self._marks += 1
        return behind[gap:]

    def _begin(self, kind: str, line: str, rest: str) -> None:
        self._kind, self.raw, self._lines = kind, [line], [rest]

    def _add(self, line: str, rest: str) -> None:
        self.raw.append(line)
        self._lines.append(rest)

    def _prefixes(self) -> tuple[str, str]:
        """Prefix of the first row of a block here, and of the others."""
        marks, self._marks = self._marks, 0
        shown = len(self._items) - marks
        blank = "".join(" " * len(item.mark) for item in self._items[:shown])
        new = "".join(item.mark for item in self._items[shown:])
        return blank + new, blank + " " * len(new)

    def _ended(self) -> list[Event]:
        """End the open block, if any."""
        if not self._lines:
            return []
        block = FlatBlock("\n".join(self._lines), "\n".join(self.raw), *self._prefixes())
        self.raw, self._lines, self._kind = [], [], ""
        return [block]


def open_code(previous: str) -> tuple[BlockSplitter, str]:
    """A splitter that continues `previous`, and the language of a fence open there."""
    splitter, language = BlockSplitter(), ""
    for line in previous.split("\n")[:-1]:
        for event in splitter.line(line):
            language = event.language if isinstance(event, FenceStart) else language
    return (splitter, language) if splitter.in_code else (BlockSplitter(), "")


def _expand_tabs(line: str) -> str:
    """The line with its leading tabs expanded."""
    body = line.lstrip(" \t")
    return line[: len(line) - len(body)].expandtabs(_TAB) + body


def _indent(line: str) -> int:
    body = line.lstrip(" \t")
    return len(line[: len(line) - len(body)].expandtabs(_TAB))


def _without(line: str, columns: int) -> str:
    """`line` without up to `columns` leading blanks; further tabs stay."""
    if columns == 0:
        return line
    indent = _indent(line)
    return " " * (indent - columns) + line.lstrip(" \t") if indent > columns else line.lstrip(" \t")
