"""Breaks a styled text into rows: at blanks and between wide characters; an address is never broken, to be copied."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from rich.cells import cell_len
from rich.text import Text

_JOINER, _MODIFIERS = "\u200d", ("\U0001f3fb", "\U0001f3ff")


def wrapped(text: Text, columns: int) -> Iterator[Text]:
    """The rows of `text`, without the blanks that they end with. A row is wider than `columns` where it is one address,
    which the terminal breaks."""
    for line in text.split("\n", allow_blank=True):
        for row in line.divide(_breaks(line.plain, columns)):
            row.rstrip()
            yield row


def _breaks(line: str, columns: int) -> list[int]:
    """Where rows begin, but for the first."""
    found, column, place = list[int](), 0, 0
    for part in _parts(line):
        width, shown = cell_len(part), cell_len(part.rstrip(" "))
        if column and column + shown > columns:
            found.append(place)
            column = 0
        if shown > columns and "://" not in part:
            rows = list(_folded(part, columns))
            found += [place + begin for begin, _ in rows[1:]]
            column = rows[-1][1]
        else:
            column += width
        place += len(part)
    return found


def _parts(line: str) -> Iterator[str]:
    """What stays on one row, with the blanks behind it."""
    begin = 0
    for place in range(1, len(line)):
        before, after = line[place - 1], line[place]
        if (before == " " != after) or (after != " " and _breaks_between(before, after)):
            yield line[begin:place]
            begin = place
    yield line[begin:]


def _breaks_between(before: str, after: str) -> bool:
    """Two characters that no blank parts may stand on two rows: one is wide, and the second goes with none before."""
    if before.isascii() and after.isascii():
        return False
    if before == _JOINER or _goes_with_the_one_before(after) or unicodedata.category(before) in ("Ps", "Pi"):
        return False
    return any(unicodedata.east_asian_width(each) in "WF" for each in (before, after))


def _goes_with_the_one_before(letter: str) -> bool:
    is_mark = letter == _JOINER or _MODIFIERS[0] <= letter <= _MODIFIERS[1]
    return is_mark or unicodedata.category(letter) in ("Mn", "Me", "Mc", "Pe", "Pf", "Po")


def _folded(part: str, columns: int) -> Iterator[tuple[int, int]]:
    """Where rows of one long word begin, and how many columns each takes."""
    begin, column = 0, 0
    for place, letter in enumerate(part.rstrip(" ")):
        width = cell_len(letter)
        if column and column + width > columns and not _goes_with_the_one_before(letter):
            yield begin, column
            begin, column = place, 0
        column += width
    yield begin, column + len(part) - len(part.rstrip(" "))
