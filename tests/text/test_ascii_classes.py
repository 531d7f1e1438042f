r"""\d, \w and \s of --regex and of a schema's `pattern`: ASCII, and all of Unicode under (?u)."""

from __future__ import annotations

import json

import pytest

from localq.text.ascii_classes import ascii_classes
from localq.text.grammar import Grammar, matches

ARABIC, KELVIN, NO_BREAK = "\u0665", "\u212a", "\u00a0"
CASES = [
    (r"\d{4}-\d\d-\d\d", "1912-04-14", "1912-04-1\U0001fbf8"),  # the example of the README, and what it wrote
    (r"\w+", "ship_1", "süß"),
    (r"a\sb", "a\tb", f"a{NO_BREAK}b"),
    (r"[\d.]+", "1.2", f"1.{ARABIC}"),
    (r"[^\d]", ARABIC, "1"),
    (r"\D", ARABIC, "1"),
    (r"\W", "é", "e"),
    (r"\S", NO_BREAK, " "),
    (r"[\W]", "é", "e"),
    (r"(?i)\w", "K", KELVIN),
    (r"(?u)\d", ARABIC, "x"),
    (r"(?u:\d)\d", f"{ARABIC}5", ARABIC + ARABIC),
    (r"((?u)\d)\d", f"{ARABIC}5", ARABIC + ARABIC),
    (r"(?u)(?i:\d)\d", ARABIC + ARABIC, "x1"),
    (r"(?P<year>\d)(?:\d)", "12", f"1{ARABIC}"),
    (r"[]\d]", "]", ARABIC),
    (r"[[:alpha:]\d]", "1", ARABIC),
    (r"\\d", r"\d", "1"),
    (r"(?x) \d \d", "12", f"1{ARABIC}"),
]


@pytest.mark.parametrize(("pattern", "right", "wrong"), CASES)
def test_classes_are_ascii_unless_unicode_is_asked_for(pattern, right, wrong):
    assert matches(Grammar("regex", pattern), right)
    assert not matches(Grammar("regex", pattern), wrong)


@pytest.mark.parametrize(("pattern", "right", "wrong"), CASES)
def test_the_pattern_of_a_schema_reads_them_alike(pattern, right, wrong):
    schema = Grammar("json_schema", json.dumps({"type": "string", "pattern": f"^({pattern})$"}))
    assert matches(schema, json.dumps(right, ensure_ascii=False))
    assert not matches(schema, json.dumps(wrong, ensure_ascii=False))


def test_the_names_of_pattern_properties_are_patterns_too():
    schema = Grammar("json_schema", '{"type": "object", "patternProperties": {"^\\\\s$": {"type": "integer"}}}')
    assert matches(schema, '{" ": 1}')
    assert not matches(schema, f'{{"{NO_BREAK}": 1}}')


def test_a_comment_is_no_part_of_the_pattern():
    assert ascii_classes("(?x)\\d # ([\\d\n(?u)\\d") == "(?x)[0-9] # ([\\d\n(?u)\\d"


@pytest.mark.parametrize("pattern", ["(", "[", "\\", "a)", "(?", "(?q)", "[[", "", "(?-u)\\d", "\\Q"])
def test_what_is_malformed_or_says_ascii_itself_stays_as_it_is(pattern):
    assert ascii_classes(pattern) == pattern
