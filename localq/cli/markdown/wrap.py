"""Wraps styled text at blanks and between wide characters; URLs stay whole, for copying."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from rich.cells import cell_len
from rich.text import Text

_JOINER, _MODIFIERS = "\u200d", ("\U0001f3fb", "\U0001f3ff")


def wrap(text: Text, columns: int) -> Iterator[Text]:
    """The rows of `text`, without trailing blanks. A row that is one long URL may be wider than `columns`."""
    for line in text.split("\n", allow_blank=True):
        for row in line.divide(_breaks(line.plain, columns)):
            row.rstrip()
            yield row


def _breaks(line: str, columns: int) -> list[int]:
    """Start positions of all rows but the first."""
    found, column, place = list[int](), 0, 0
    for part in _parts(line):
        width, shown = cell_len(part), cell_len(part.rstrip(" "))
        if column and column + shown > columns:
            found.append(place)
            column = 0
        if shown > columns and "://" not in part:
            rows = list(_fold(part, columns))
            found += [place + begin for begin, _ in rows[1:]]
            column = rows[-1][1]
        else:
            column += width
        place += len(part)
    return found


def _parts(line: str) -> Iterator[str]:
    """Unbreakable parts, each with its trailing blanks."""
    begin = 0
    for place in range(1, len(line)):
        before, after = line[place - 1], line[place]
        if (before == " " != after) or (after != " " and _breaks_between(before, after)):
            yield line[begin:place]
            begin = place
    yield line[begin:]


def _breaks_between(before: str, after: str) -> bool:
    """Return whether a row may break between these: one is wide, and the second does not attach to the first."""
    if before.isascii() and after.isascii():
        return False
    if before == _JOINER or _attaches_to_previous(after) or unicodedata.category(before) in ("Ps", "Pi"):
        return False
    return any(unicodedata.east_asian_width(each) in "WF" for each in (before, after))


def _attaches_to_previous(letter: str) -> bool:
    is_mark = letter == _JOINER or _MODIFIERS[0] <= letter <= _MODIFIERS[1]
    return is_mark or unicodedata.category(letter) in ("Mn", "Me", "Mc", "Pe", "Pf", "Po")


def _fold(part: str, columns: int) -> Iterator[tuple[int, int]]:
    """(start, columns) of each row of one long word."""
    begin, column = 0, 0
    for place, letter in enumerate(part.rstrip(" ")):
        width = cell_len(letter)
        if column and column + width > columns and not _attaches_to_previous(letter):
            yield begin, column
            begin, column = place, 0
        column += width
    yield begin, column + len(part) - len(part.rstrip(" "))
