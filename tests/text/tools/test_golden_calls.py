"""Replies with calls of every family against golden files, whole and for every cut in two."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from localq.text.tools.formats import tool_format
from tests.support.text.tool_calls import FOLDER, FORMATS, IN_TEXT, cut, read

FILES = {name: json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in IN_TEXT}
CASES = [pytest.param(name, case, id=f"{name}: {case['name']}") for name in IN_TEXT for case in FILES[name]["cases"]]
LONGEST = 160  # characters of a case that is cut at every place


def expected(case: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    return case["content"], [(call["name"], call["arguments"]) for call in case["calls"]]


@pytest.mark.parametrize("name", IN_TEXT)
def test_each_family_has_cases_of_a_named_source(name):
    assert len(FILES[name]["cases"]) >= 50
    assert "localq's own" in FILES[name]["source"]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_text_and_calls_are_those_of_the_golden_file(name, case):
    form, text, draw = FORMATS[name], case["text"], random.Random(case["name"])
    assert read(form, [text]) == expected(case)
    assert read(form, text) == expected(case)  # character by character
    places = range(len(text)) if len(text) <= LONGEST else draw.sample(range(len(text)), 40)
    for place in places:
        assert read(form, [text[:place], text[place:]]) == expected(case)
    assert read(form, cut(text, draw)) == expected(case)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_beginning_of_a_reply_loses_nothing(name, case):
    """Calls of the beginning are the first ones of the whole; where there are none, the text is all there is."""
    text, draw = case["text"], random.Random(case["name"])
    for place in draw.sample(range(len(text)), min(len(text), 12)):
        said, calls = read(FORMATS[name], [text[:place]])
        if case["calls"]:  # else what follows may make a whole call into none
            assert calls == expected(case)[1][: len(calls)]
        assert calls or said == text[:place]


@pytest.mark.parametrize("name", IN_TEXT)
def test_nothing_of_a_call_is_given_out_before_it_is_whole(name):
    form = FORMATS[name]
    case = next(each for each in FILES[name]["cases"] if each["name"] == "a nested object")
    stream, given = form.stream([]), 0
    for char in case["text"][:-1]:
        given += len(stream.push(char))
        if not stream.calls:
            assert given == 0


def test_no_format_where_a_template_takes_no_tools():
    for template in (None, "", "{{ messages }}", "{% if tools %}{{ tools }}{% endif %}", "<tool_call> {{ messages }}"):
        assert tool_format(template) is None
