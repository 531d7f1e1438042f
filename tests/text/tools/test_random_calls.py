"""Random calls, written apart from the parsers, are read as they were meant, however the text is cut."""

from __future__ import annotations

import random

import pytest

from tests.support.text.tool_calls import FORMATS, IN_TEXT, WRITERS, cut, random_call, random_text, read

SEEDS = 200


@pytest.mark.parametrize("name", IN_TEXT)
def test_calls_are_read_as_they_were_meant(name):
    draw = random.Random(name)
    for _ in range(SEEDS):
        calls = [random_call(draw) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        before, after = (draw.choice(("", "Let me see.", "1 < 2 {x}")) for _ in range(2))
        text = before + draw.choice(("", "\n", "\n\n")) + WRITERS[name](calls) + ("\n" + after if after else "")
        assert read(FORMATS[name], [text]) == (before + after, calls), text
        assert read(FORMATS[name], cut(text, draw)) == (before + after, calls), text


@pytest.mark.parametrize("name", IN_TEXT)
def test_what_is_broken_off_is_given_back_and_whole_calls_stay(name):
    draw = random.Random(f"broken {name}")
    for _ in range(SEEDS // 4):
        calls = [random_call(draw) for _ in range(2)]
        text = WRITERS[name](calls)
        end = draw.randrange(len(text))
        said, found = read(FORMATS[name], cut(text[:end], draw))
        assert found == calls[: len(found)]
        assert (said, found) == read(FORMATS[name], [text[:end]])
        if not found:
            assert said == text[:end]


@pytest.mark.parametrize("name", IN_TEXT)
def test_text_without_calls_passes_to_the_letter(name):
    draw = random.Random(f"text {name}")
    marks = [*FORMATS[name].marks, *FORMATS[name].openings]
    for _ in range(SEEDS):
        text = "".join(draw.choice((random_text(draw), draw.choice(marks)[: draw.randrange(9)])) for _ in range(4))
        assert read(FORMATS[name], cut(text, draw)) == (text, [])
