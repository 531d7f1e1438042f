"""Tables where the terminal is too narrow for them: nothing is cut, no word is broken."""

from __future__ import annotations

import pytest

from localq.wording import table_lines

HEADERS = ("NAME", "N", "MEANING")
ROWS = [("one", "1", "a sentence of some words, which are more than fit"), ("three", "333", "short"), ("four", "4", "")]
RIGHT = frozenset({1})


@pytest.mark.parametrize("width", [None, 63, 200])
def test_where_there_is_room_a_row_is_a_line(width):
    assert table_lines(HEADERS, ROWS, RIGHT, width) == [
        "NAME     N  MEANING",
        "one      1  a sentence of some words, which are more than fit",
        "three  333  short",
        "four     4",
    ]


def test_the_last_column_goes_on_below_its_beginning():
    assert table_lines(HEADERS, ROWS, RIGHT, 40) == [
        "NAME     N  MEANING",
        "one      1  a sentence of some words,",
        "            which are more than fit",
        "three  333  short",
        "four     4",
    ]


def test_without_room_it_stands_below_the_others():
    assert table_lines(HEADERS, ROWS, RIGHT, 30) == [
        "NAME     N",
        "    MEANING",
        "one      1",
        "    a sentence of some words,",
        "    which are more than fit",
        "three  333",
        "    short",
        "four     4",
    ]


def test_a_path_is_never_broken_and_columns_come_closer_where_that_helps():
    path = "/home/someone/a/rather/long/path/to/a/file"
    assert table_lines(("A", "PATH"), [("model", path)], width=40) == ["A", "    PATH", "model", f"    {path}"]
    wide = [("aaaa", "bbbb", "cccc", "some words")]
    assert table_lines(("A", "B", "C", "D"), wide, width=15)[2:] == ["aaaa bbbb cccc", "    some words"]


@pytest.mark.parametrize("width", range(1, 70))
def test_no_width_loses_a_word(width):
    told = " ".join(table_lines(HEADERS, ROWS, RIGHT, width)).split()
    assert sorted(told) == sorted(word for row in (HEADERS, *ROWS) for cell in row for word in cell.split())
