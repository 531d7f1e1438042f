"""Arguments that are text: the declared type decides; and Python's values, numbers as they are written, long calls."""

from __future__ import annotations

import json
import time

import pytest

from localq.text.tools import json_text, python_values, values
from localq.text.tools.declaration import MAX_DEPTH, Tool
from localq.text.tools.json_formats import HermesFormat
from localq.text.tools.reader import NotACall
from localq.text.tools.tag_formats import TagFormat

KINDS = {
    "string": {"type": "string"}, "integer": {"type": "integer"}, "number": {"type": "number"},
    "boolean": {"type": "boolean"}, "array": {"type": "array"}, "object": {"type": "object"},
    "text or null": {"type": ["string", "null"]}, "text or number": {"anyOf": [{"type": "string"}, {"type": "number"}]},
    "reference": {"$ref": "#/$defs/count"}, "enum": {"enum": ["a", "5"]}, "numbers": {"enum": [1, 2]}, "any": {},
    "all": {"allOf": [{"type": "integer"}]}, "const": {"const": "7"}, "loop": {"$ref": "#/$defs/loop"},
}  # fmt: skip
TOOL = Tool("t", "", {
    "type": "object", "properties": KINDS,
    "$defs": {"count": {"type": "integer"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "boolean"}]}},
})  # fmt: skip
CASES = [
    ("string", "5", "5"), ("string", "true", "true"), ("string", "null", "null"), ("string", "", ""),
    ("string", ' "a" ', ' "a" '), ("string", "a\nb", "a\nb"),
    ("integer", "5", 5), ("integer", " -5\n", -5), ("integer", "five", "five"), ("integer", "", ""),
    ("integer", "5.0", 5.0), ("integer", "1" * 30, int("1" * 30)), ("integer", "null", None), ("integer", "05", "05"),
    ("number", "1e-3", 0.001), ("number", "NaN", "NaN"), ("number", "1,5", "1,5"),
    ("boolean", "true", True), ("boolean", "False", False), ("boolean", " TRUE ", True), ("boolean", "yes", "yes"),
    ("array", "[1, \"a\"]", [1, "a"]), ("array", "['a', True, None]", ["a", True, None]), ("array", "a, b", "a, b"),
    ("object", '{"a": {"b": []}}', {"a": {"b": []}}), ("object", "{'a': 1}", {"a": 1}), ("object", "{", "{"),
    ("text or null", "null", None), ("text or null", "None", None), ("text or null", "5", "5"),
    ("text or null", "[1]", "[1]"), ("text or number", "5", 5), ("text or number", "true", "true"),
    ("text or number", "five", "five"), ("reference", "5", 5), ("enum", "5", "5"), ("numbers", "2", 2),
    ("any", "5", 5), ("any", "true", True), ("any", "five", "five"), ("any", '"a"', '"a"'), ("any", "", ""),
    ("all", "5", 5), ("const", "7", "7"), ("loop", "true", True), ("undeclared", "[1]", [1]), ("undeclared", "x", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "value"), CASES)
def test_the_declared_type_decides(name, text, value):
    found = json.loads(values.text_value(TOOL, name, text))
    assert found == value
    assert type(found) is type(value)


def test_additional_properties_and_unknown_tools_have_types_where_something_says_so():
    table = Tool("t", "", {"type": "object", "additionalProperties": {"type": "string"}})
    assert values.text_value(table, "x", "5") == '"5"'
    assert values.text_value(None, "x", "5") == "5"


PYTHON = {
    "'a'": "a", '"a"': "a", "'it''s'": "it''s", r"'\n\t\\\''": "\n\t\\'", r"'\x41\u00e9\U0001f600'": "Aé😀", "''": "",
    "'''a\n'b'''": "a\n'b", '""': "", "True": True, "None": None, "null": None, "-1": -1, "+2": 2, "0x1F": 31,
    "1_000": 1000, ".5": 0.5, "5.": 5.0, "1e3": 1000.0, "[]": [], "(1, 2)": [1, 2], "[1, [2,],]": [1, [2]],
    "{'a': {1: 'x'}}": {"a": {"1": "x"}}, "word": "word", "007": "007", "1e999": None,
    r"'\q'": "\\q", r"'\ud83d\ude00'": "😀", "'a' b'": "a' b",
}  # fmt: skip


@pytest.mark.parametrize("text", PYTHON)
def test_python_s_values_become_json(text):
    found = python_values.load(text)
    if text == "1e999":
        assert found == text  # JSON has it, although no float does
        return
    assert json.loads(found) == PYTHON[text]


@pytest.mark.parametrize("text", ["", "'a", "[1", "{1}", "{'a'}", "f(1)", "[" * (MAX_DEPTH + 2), "1 2"])
def test_what_is_no_value_of_python_is_none(text):
    with pytest.raises(NotACall):
        python_values.load(text)


@pytest.mark.parametrize("number", ["1.0", "1e400", "-0", "12345678901234567890123", "0.10"])
def test_numbers_reach_the_tool_as_they_are_written(number):
    for form, text in (
        (HermesFormat(), f'<tool_call>{{"name": "t", "arguments": {{"number": {number}}}}}</tool_call>'),
        (TagFormat(), f"<tool_call><function=t><parameter=number>{number}</parameter></function></tool_call>"),
    ):
        stream = form.stream([TOOL])
        stream.push(text)
        assert stream.calls[0].arguments == f'{{"number": {number}}}'


@pytest.mark.parametrize("text", ["", "[", "[1 2]", "{}", "[1]x", "[NaN]"])
def test_a_list_that_is_none(text):
    with pytest.raises(NotACall):
        json_text.items(text)


def test_what_is_nested_too_deeply_is_no_call():
    text = '<tool_call>{"name": "t", "arguments": ' + '{"a":' * 100_000 + "1" + "}" * 100_001 + "</tool_call>"
    stream = HermesFormat().stream([TOOL])
    pieces = [*stream.push(text), *stream.finish()]
    assert stream.calls == ()
    assert "".join(piece.text for piece in pieces) == text


@pytest.mark.parametrize("form", [HermesFormat(), TagFormat()])
def test_a_long_call_takes_linear_time(form):
    value = '</parameter> } { " <tool_call> ' * 8000
    text = (
        f"<tool_call>\n{json.dumps({'name': 't', 'arguments': {'string': value}})}\n</tool_call>"
        if form.name == "hermes"
        else f"<tool_call>\n<function=t>\n<parameter=string>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )
    stream, started = form.stream([TOOL]), time.process_time()
    for at in range(0, len(text), 4):
        stream.push(text[at : at + 4])
    assert json.loads(stream.calls[0].arguments) == {"string": value}
    assert time.process_time() - started < 5


def test_a_reply_of_unfinished_calls_ends_soon():
    text = '<tool_call>{"' * 20_000
    stream, started = HermesFormat().stream([TOOL]), time.process_time()
    pieces = [*stream.push(text), *stream.finish()]
    assert "".join(piece.text for piece in pieces) == text
    assert time.process_time() - started < 5
