"""Tools as they are declared: names, counts, sizes, depths."""

from __future__ import annotations

import json

import pytest

from localq.errors import ExitCode, LocalqError
from localq.text.tools import declaration
from localq.text.tools.declaration import Tool, ToolCall

NESTED: dict[str, object] = {"type": "object"}
for _ in range(declaration.MAX_DEPTH):
    NESTED = {"type": "object", "properties": {"a": NESTED}}


@pytest.mark.parametrize("name", ["a", "get_weather", "A-1", "x" * 64])
def test_names_of_letters_digits_and_two_signs_are_taken(name):
    tool = Tool(name, "d", {"type": "object", "properties": {"a": {}}})
    assert tool.to_dict() == {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": tool.parameters},
    }
    assert Tool.from_dict(tool.to_dict()) == Tool.from_dict(tool.to_dict()["function"]) == tool


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 65, "a.b", "<|im_end|>", "a\n", 5, None])
def test_other_names_are_refused(name):
    with pytest.raises(LocalqError, match="invalid name") as caught:
        Tool(name)
    assert caught.value.exit_code == ExitCode.USAGE
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "parameters",
    [{"type": "string"}, [], "x", None, {"properties": []}, {"properties": {"a": 1}}, {"type": ["object"]}],
)
def test_parameters_that_are_no_schema_of_an_object_are_refused(parameters):
    with pytest.raises(LocalqError, match="a JSON schema for an object"):
        Tool("t", "", parameters)


def test_what_is_nested_too_deeply_is_refused():
    with pytest.raises(LocalqError, match="levels deep"):
        Tool("t", "", NESTED)


@pytest.mark.parametrize("value", [5, None, [], {"type": "custom", "name": "a"}, {"type": "web_search"}])
def test_a_declaration_of_another_kind_is_refused(value):
    with pytest.raises(LocalqError, match=r'each tool must have the type "function"|invalid name'):
        Tool.from_dict(value)


def test_a_declaration_without_parameters_has_none():
    assert Tool.from_dict({"name": "a"}) == Tool("a")
    assert Tool.from_dict({"name": "a", "description": None, "parameters": None, "strict": True}).strict
    assert not Tool.from_dict({"name": "a", "strict": "yes"}).strict


def test_too_many_tools_equal_names_and_large_tools_are_refused():
    assert list(declaration.check([Tool("b"), Tool("a")])) == ["b", "a"]
    for tools, why in (
        ([Tool(f"t{number}") for number in range(declaration.MOST + 1)], "too many"),
        ([Tool("a"), Tool("b"), Tool("a")], "a is declared twice"),
        ([Tool("a", "x" * declaration.MAX_BYTES)], "larger than 256 KiB"),
    ):
        with pytest.raises(LocalqError, match=why):
            declaration.check(tools)


def test_a_call_goes_back_with_its_arguments_as_an_object():
    call = ToolCall("f", '{"a": 1.50}')
    assert call.to_dict("x") == {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": 1.5}}}
    assert json.loads(json.dumps(call.to_dict("x"))) == call.to_dict("x")
