"""Arguments of a call against a declared schema, and results as text."""

from __future__ import annotations

import json

import pytest
from mcp_types import EmbeddedResource, ImageContent, ResourceLink, TextContent, TextResourceContents

from localq.chat.tools.arguments import mismatch
from localq.chat.tools.results import of_content

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "count": {"type": "integer"},
        "kind": {"enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {"type": ["object", "null"], "required": ["x"], "properties": {"x": {"type": "number"}}},
        "any": True,
    },
    "required": ["path"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "value",
    [{"path": ""}, {"path": "p", "count": 2.0, "kind": "a", "tags": ["t"], "more": {"x": 1.5}, "any": [1]},
     {"path": "p", "more": None}],
)  # fmt: skip
def test_what_matches(value):
    assert mismatch(json.dumps(value), SCHEMA) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "path is missing"),
        ('{"path": 1}', "path: expected string, got integer"),
        ('{"path": "p", "count": true}', "count: expected integer, got boolean"),
        ('{"path": "p", "count": 1.5}', "count: expected integer, got number"),
        ('{"path": "p", "kind": "c"}', 'kind: expected one of ["a", "b"]'),
        ('{"path": "p", "tags": ["t", 1]}', "tags[1]: expected string, got integer"),
        ('{"path": "p", "more": {}}', "more.x is missing"),
        ('{"path": "p", "more": {"x": "1"}}', "more.x: expected number, got string"),
        ('{"path": "p", "evil": 1}', "unknown property evil; allowed: path, count"),
    ],
)
def test_what_does_not_match_is_named(text, why):
    assert why in mismatch(text, SCHEMA)


@pytest.mark.parametrize(
    "schema",
    [{}, {"type": 3}, {"type": "strange"}, {"properties": []}, {"required": "path"}, {"properties": {"a": 5}},
     {"enum": 5}, {"$ref": "http://h.example/schema"}, {"properties": {"a": {"pattern": "(a+)+$"}}}],
)  # fmt: skip
def test_a_schema_that_says_nothing_to_this_check_lets_pass(schema):
    assert mismatch(json.dumps({"a": "a" * 40 + "!"}), schema) == ""


def test_a_deep_value_ends():
    schema: dict = {}
    schema["properties"] = {"a": schema}
    assert mismatch('{"a":' * 900 + "1" + "}" * 900, schema) == ""
    assert "not valid JSON" in mismatch("[" * 100_000, schema)


def test_a_result_is_the_text_of_its_parts():
    parts = [
        TextContent(type="text", text="one\x1b[2J"),
        ImageContent(type="image", data="aGVsbG8gd29ybGQh", mime_type="image/png"),
        ResourceLink(type="resource_link", name="n", uri="file:///x"),
        EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///y", text="two")),
    ]
    made = of_content(parts, {"not": "used"}, failed=False)
    assert made.text == "one[2J\n[image, image/png, 12 B: not readable as text]\n[resource: file:///x]\ntwo"
    assert of_content([], {"n": "ü"}, failed=False).text == '{"n": "ü"}'
    assert of_content([], None, failed=False).text == "(no output)"
    assert of_content([], None, failed=True).failed


def test_a_long_result_is_cut_and_says_so():
    cut = of_content([TextContent(type="text", text="x" * 5000)], None, failed=False).limit(100)
    assert cut.for_model == "x" * 100 + "\n[truncated: showing the first 100 of 5,000 characters]"
    assert cut.summary == "the first 100 of 5,000 characters"
