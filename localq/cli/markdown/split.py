"""Takes a reply apart into blocks of Markdown while it streams, line by line: each can be drawn once it has ended.

Block structure by CommonMark 0.31.2 and GFM's tables, flat: an item of a list is a block with a mark before its first
row, and what follows within it is indented. So no block is long because a list is, and every line is looked at once.
Other than there, a fence ends where it is closed, however its lines are indented, since that is what models mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FENCE = re.compile(r"(`{3,})([^`]*)\Z|(~{3,})(.*)\Z")
_HEADING = re.compile(r"#{1,6}(?:[ \t]|\Z)")
_UNDERLINE = re.compile(r"(?:=+|-+)[ \t]*\Z")
_RULE = re.compile(r"(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})\Z")
_ITEM = re.compile(r"(?:[-*+]|(\d{1,9})([.)]))(?=[ \t]|\Z)")
_CODE = 4  # columns from which on a line is code
_TAB = 4
_NOWHERE = 10**9  # columns that no line begins at
_DEEPEST = 20  # lists within lists; what is deeper is text


@dataclass(frozen=True)
class Block:
    """What has ended: Markdown of its own, without the indentation of the lists that it is in.

    raw           as it was written
    first, rest   what goes before its first row, and before the others: marks of items, blanks
    """

    source: str
    raw: str = ""
    first: str = ""
    rest: str = ""


@dataclass(frozen=True)
class Opened:
    """A fence: what follows is code, by its first word in `language`."""

    language: str


@dataclass(frozen=True)
class Code:
    """A line of it."""

    text: str


@dataclass(frozen=True)
class Closed:
    """The end of the code."""


Event = Block | Opened | Code | Closed


@dataclass(frozen=True)
class _Item:
    """Lines of it begin `offset` columns behind those of what it is in; `mark` is shown before its first."""

    offset: int
    mark: str
    ends: str = ""  # of a number: . or )
    number: int = 0


@dataclass(frozen=True)
class _Fence:
    mark: str
    indent: int


class Splitter:
    """Lines in, what has ended out. `raw`: the lines of the block that has not."""

    def __init__(self) -> None:
        self.raw: list[str] = []
        self._lines: list[str] = []  # of that block, without the indentation of its lists
        self._kind = ""  # "text", "quote" or "indented"
        self._items: list[_Item] = []
        self._marks = 0  # of the innermost items, that are not shown yet
        self._fence: _Fence | None = None

    @property
    def in_code(self) -> bool:
        """A fence is open."""
        return self._fence is not None

    def dedented(self, line: str) -> str:
        """A line of code without the indentation of its fence."""
        return "" if self._fence is None else _without(line, self._fence.indent)

    def may_close(self, begun: str) -> bool:
        """What has come of a line may be the end of the code."""
        assert self._fence is not None
        body = begun.strip(" \t")
        return not body.strip(self._fence.mark[0]) and _indent(begun) < self._fence.indent + _CODE

    def closes(self, line: str) -> bool:
        """This line is the end of the code."""
        return self._fence is not None and self.may_close(line) and line.strip(" \t").startswith(self._fence.mark)

    def line(self, line: str) -> list[Event]:
        """One line, without its end; what has ended by it."""
        if self._fence is not None:
            if self.closes(line):
                self._fence = None
                return [Closed()]
            return [Code(self.dedented(line))]
        if not line.strip(" \t"):
            if self._lines == [""]:  # an item that begins with two empty lines ends there
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
        """There is no more."""
        if self._fence is None:
            return self._ended()
        self._fence = None
        return [Closed()]

    def _place(self, line: str) -> tuple[int, str]:
        """Of how many lists the line is a part, and what it is there."""
        depth, rest = 0, line
        for item in self._items:
            if _indent(rest) < item.offset:
                break
            depth, rest = depth + 1, _without(rest, item.offset)
        return depth, rest

    def _starts(self, rest: str, depth: int) -> bool:
        """Whether the open block ends here by what this line is."""
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
            amid = self._kind == "text" and within and self._lines
            return not amid or (item.end() < len(body) and item[1] in (None, "1"))
        return self._kind == "indented" or (self._lines == [""] and not within)  # no item is empty and goes on

    def _begun(self, line: str, depth: int, rest: str) -> list[Event]:
        """The open block has ended, and others begin in this line."""
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
                    events.append(Block("", line, *self._prefixes()))
                self._fence = _Fence(fence[1] or fence[3], sum(item.offset for item in self._items) + _indent(rest))
                language = (fence[2] or fence[4] or "").split()
                return [*events, Opened(language[0] if language else "")]
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
        """One more list; what stands in it. before: the item before, where there is one."""
        indent = _indent(rest)
        behind = _expanded(rest)[indent + found.end() :]
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
        """Before the first row of a block here, and before the others."""
        marks, self._marks = self._marks, 0
        shown = len(self._items) - marks
        blank = "".join(" " * len(item.mark) for item in self._items[:shown])
        new = "".join(item.mark for item in self._items[shown:])
        return blank + new, blank + " " * len(new)

    def _ended(self) -> list[Event]:
        """The open block, if there is one."""
        if not self._lines:
            return []
        block = Block("\n".join(self._lines), "\n".join(self.raw), *self._prefixes())
        self.raw, self._lines, self._kind = [], [], ""
        return [block]


def open_code(said: str) -> tuple[Splitter, str]:
    """For what goes on behind `said`: a splitter, and the language of the code where a fence is open there."""
    splitter, language = Splitter(), ""
    for line in said.split("\n")[:-1]:
        for event in splitter.line(line):
            language = event.language if isinstance(event, Opened) else language
    return (splitter, language) if splitter.in_code else (Splitter(), "")


def _expanded(line: str) -> str:
    """With blanks for the tabs that it begins with."""
    body = line.lstrip(" \t")
    return line[: len(line) - len(body)].expandtabs(_TAB) + body


def _indent(line: str) -> int:
    body = line.lstrip(" \t")
    return len(line[: len(line) - len(body)].expandtabs(_TAB))


def _without(line: str, columns: int) -> str:
    """`line` without at most so many columns of blanks at its beginning; the tabs of a code's own stay."""
    if columns == 0:
        return line
    indent = _indent(line)
    return " " * (indent - columns) + line.lstrip(" \t") if indent > columns else line.lstrip(" \t")
