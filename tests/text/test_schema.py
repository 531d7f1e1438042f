"""JSON schemas as users write them: objects are closed, and what is not enforced is noted or refused by its place."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from localq.errors import LocalqError
from localq.text.grammar import Grammar, check, matches
from localq.text.schema import FORMATS, UNSUPPORTED, prepare

A, B = {"type": "integer"}, {"type": "string"}
SHIP = {"type": "object", "properties": {"name": B, "tons": A}, "required": ["name"]}


def of(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


# ---- closed objects: (schema, a text that it admits, a text with one property more)

CLOSED = {
    "properties": (SHIP, {"name": "x"}, {"name": "x", "flag": 1}),
    "in a list": ({"type": "array", "items": SHIP}, [{"name": "x"}], [{"name": "x", "flag": 1}]),
    "behind a reference": ({"$ref": "#/$defs/S", "$defs": {"S": SHIP}}, {"name": "x"}, {"name": "x", "flag": 1}),
    "where no keyword holds schemas": (
        {"$ref": "#/components/schemas/S", "components": {"schemas": {"S": SHIP}}},
        {"name": "x"},
        {"name": "x", "flag": 1},
    ),
    "allOf": (
        {"allOf": [SHIP, {"properties": {"flag": A}, "required": ["flag"]}]},
        {"name": "x", "flag": 1},
        {"name": "x", "flag": 1, "more": 1},
    ),
    "allOf with a reference that is used alone too": (
        {
            "type": "object",
            "properties": {"alone": {"$ref": "#/$defs/S"}},
            "allOf": [{"$ref": "#/$defs/S"}],
            "$defs": {"S": SHIP},
        },
        {"alone": {"name": "y"}, "name": "x"},
        {"alone": {"name": "y", "alone": 1}, "name": "x"},
    ),
    "a reference with properties beside it": (
        {"$ref": "#/$defs/S", "properties": {"flag": A}, "required": ["flag"], "$defs": {"S": SHIP}},
        {"name": "x", "flag": 1},
        {"name": "x", "flag": 1, "more": 1},
    ),
    "a branch": ({"anyOf": [SHIP, A]}, {"name": "x"}, {"name": "x", "flag": 1}),
    "a branch beside properties has none of the other branches": (
        {**SHIP, "anyOf": [{"properties": {"a": A}, "required": ["a"]}, {"properties": {"b": A}, "required": ["b"]}]},
        {"name": "x", "a": 1},
        {"name": "x", "a": 1, "b": 1},
    ),
    "patterns": (
        {"type": "object", "patternProperties": {"^x": A}},
        {"x1": 1, "x2": 2},
        {"x1": 1, "y": 2},
    ),
    "a required name that no property describes": (
        {"type": "object", "properties": {"a": A}, "required": ["a", "b"]},
        {"a": 1, "b": [2]},
        {"a": 1, "b": 1, "c": 1},
    ),
    "unevaluatedProperties": (
        {"allOf": [SHIP], "properties": {"flag": A}, "unevaluatedProperties": False},
        {"flag": 1, "name": "x"},
        {"flag": 1, "name": "x", "more": 1},
    ),
    "unevaluatedProperties alone": ({"type": "object", "unevaluatedProperties": False}, {}, {"a": 1}),
    "itself": (
        {"$defs": {"N": {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}}}, "$ref": "#/$defs/N"},
        {"n": {"n": {}}},
        {"n": {"m": {}}},
    ),
}


def orders(value: Any) -> list[Any]:
    """The value with the properties in both directions: which of them comes first is up to llguidance."""
    return [value, dict(reversed(value.items()))] if isinstance(value, dict) else [value]


@pytest.mark.parametrize("name", CLOSED)
def test_an_object_has_the_properties_that_the_schema_names(name):
    schema, right, wrong = CLOSED[name]
    assert check(of(schema)) == []
    assert any(matches(of(schema), json.dumps(each)) for each in orders(right))
    assert not any(matches(of(schema), json.dumps(each)) for each in orders(wrong))


@pytest.mark.parametrize(
    "schema",
    [
        {**SHIP, "additionalProperties": True},
        {**SHIP, "additionalProperties": A},
        {**SHIP, "unevaluatedProperties": True},
        {"allOf": [SHIP, {"additionalProperties": True}]},
        {"$ref": "#/$defs/S", "$defs": {"S": {**SHIP, "additionalProperties": {}}}},
        {"type": "object", "required": ["name"]},
        {"type": "object"},
        {"type": "object", "additionalProperties": True},
        {},
        True,
    ],
)
def test_an_object_is_open_where_the_schema_says_so_or_names_no_property(schema):
    assert matches(of(schema), '{"name": "x", "flag": 1}') or matches(of(schema), '{"name": 1, "flag": 1}')


def test_a_schema_is_closed_in_time_whatever_its_references():
    names = {
        f"A{n}": {"properties": {f"p{n}": {}}, "allOf": [{"$ref": f"#/$defs/A{n + 1}"}] * 2} for n in range(30)
    }  # 2^30 ways from the first to the last
    started = time.process_time()
    prepare({"$defs": names | {"A30": {}}, "properties": {"q": {}}, "allOf": [{"$ref": "#/$defs/A0"}]})
    assert time.process_time() - started < 5


COLOURS = {"enum": ["red", "blue"], "title": "Colour", "type": "string"}
NAMED = {
    "an enumeration": {"propertyNames": COLOURS, "additionalProperties": A, "type": "object"},
    "an enumeration elsewhere": {
        "$defs": {"C": COLOURS}, "propertyNames": {"$ref": "#/$defs/C"}, "additionalProperties": A, "type": "object",
    },
    "a pattern": {"propertyNames": {"pattern": "^(red|blue)$"}, "additionalProperties": A, "type": "object"},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_names_of_properties_may_be_listed_or_have_a_pattern(name):
    """As pydantic writes a dictionary whose keys are an enumeration."""
    schema = of({"type": "object", "properties": {"tons": NAMED[name]}, "$defs": NAMED[name].get("$defs", {})})
    assert check(schema) == []
    assert matches(schema, '{"tons": {"red": 1, "blue": 2}}')
    assert matches(schema, '{"tons": {}}')
    assert not matches(schema, '{"tons": {"green": 1}}')
    assert not matches(schema, '{"tons": {"red": "x"}}')


# ---- what is not enforced


def test_every_format_is_checked_or_passed_over_with_a_note():
    """Those of JSON Schema 2020-12, of OpenAPI and of pydantic."""
    named = [
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "regex"),
        *("relative-json-pointer", "int32", "int64", "float", "double", "byte", "binary", "password", "path"),
        *("file-path", "directory-path", "base64url", "json-string", "ipvanyaddress", "ipvanynetwork", "name-email"),
        *("uuid4", "color", "multi-host-uri", "decimal"),
    ]
    for name in named:
        schema = {"type": "object", "properties": {"a/b": {"type": "string", "format": name}}}
        said = [] if name in FORMATS else [f'format "{name}" (at #/properties/a~1b) is not enforced']
        assert check(of(schema)) == said
    for name in FORMATS:
        assert check(of({"type": "string", "format": name})) == []


def test_a_format_at_many_places_is_one_note():
    schema = {"type": "object", "properties": {name: {"type": "string", "format": "password"} for name in "abc"}}
    assert check(of(schema)) == ['format "password" (at #/properties/a and 2 more places) is not enforced']


VALUES = {
    "not": A, "uniqueItems": True, "contains": A, "propertyNames": {"minLength": 2}, "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": A}, "dependencies": {"a": ["b"]}, "$dynamicRef": "#a", "$dynamicAnchor": "a",
    "$recursiveRef": "#", "$recursiveAnchor": True,
}  # fmt: skip


@pytest.mark.parametrize("keyword", VALUES)
def test_a_keyword_that_cannot_be_enforced_is_refused_by_name_and_place(keyword):
    schema = {"type": "array", "items": {"type": ["object", "array", "string"], keyword: VALUES[keyword]}}
    with pytest.raises(LocalqError) as caught:
        check(of(schema))
    assert f'the JSON schema: "{keyword}" at #/items is not supported. Remove the keyword, or' in str(caught.value)
    lenient = {**schema, "x-guidance": {"lenient": True}}
    assert check(of(lenient)) == [f'"{keyword}" (at #/items) is not enforced']


def test_conditions_and_unevaluated_parts_are_refused_where_they_say_something():
    for keyword, schema in {
        "if": {"if": {"properties": {"a": A}}, "then": {"required": ["b"]}},
        "minContains": {"contains": A, "minContains": 2},
        "unevaluatedProperties": {"allOf": [SHIP], "unevaluatedProperties": B},
        "unevaluatedItems": {"allOf": [{"type": "array"}], "unevaluatedItems": False},
    }.items():
        with pytest.raises(LocalqError, match="is not supported") as caught:
            check(of(schema))
        assert keyword in str(caught.value) or "contains" in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        {"not": False}, {"uniqueItems": False}, {"propertyNames": {}}, {"dependentRequired": {}}, {"minContains": 2},
        {"then": A}, {"if": A}, {"unevaluatedItems": True}, {"$recursiveAnchor": False}, {"dependencies": {}},
        {"deprecated": True}, {"nullable": True}, {"example": 1}, {"discriminator": {}}, {"anything": 3},
    ],
)  # fmt: skip
def test_a_keyword_that_says_nothing_is_passed_over(said):
    assert check(of({"type": ["object", "array"], **said})) == []


def test_every_unsupported_keyword_is_one_that_llguidance_does_not_have():
    from llguidance import LLMatcher

    for keyword in UNSUPPORTED:
        text = LLMatcher.grammar_from_json_schema(json.dumps({"type": "object", keyword: VALUES.get(keyword, A)}))
        failed, messages = LLMatcher.validate_grammar_with_warnings(text)
        assert failed, keyword
        assert keyword in messages[0]


def test_one_of_is_read_as_any_of_with_a_note_where_branches_may_overlap():
    overlap = {"oneOf": [{"type": "object", "properties": {name: B}} for name in "ab"]}
    assert check(of(overlap)) == ['"oneOf" (at #) is treated as "anyOf"']
    assert matches(of(overlap), '{"a": "x"}')
    kinds = {"oneOf": [{"type": "object", "properties": {"t": {"const": t}}, "required": ["t"]} for t in "ab"]}
    assert check(of(kinds)) == []
