"""Grammars of calls: they take what a family writes and nothing else, and whatever they allow is a call that fits.

Replies are token ids: the marks of a family are special tokens, tokens that are none, or no tokens at all.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken

from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.text import grammar, harmony
from localq.text.grammar import Grammar
from localq.text.tokenizer import Tokenizer
from localq.text.tools.declaration import Tool
from localq.worker.token_masks import WORD, GrammarConstraint, Vocabulary
from tests.support.files.real_model import smollm2
from tests.support.text import tiny_tokenizers
from tests.support.text.tool_calls import FORMATS, IN_TEXT, WRITERS, Call, read

UNIT = {"type": "string", "enum": ["C", "F", 'it\'s "warm"']}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": UNIT,
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "range": {"$ref": "#/$defs/range"},
        "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "$defs": {"range": {"type": "object", "properties": {"low": {"enum": [1, 2, 3]}}, "required": ["low"]}},
}
WEATHER, CLOCK = Tool("weather", "Forecast.", SCHEMA, strict=True), Tool("clock", "", {"type": "object"}, strict=True)
NONE = Tool("no_arguments", "", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True)
TOOLS = [WEATHER, NONE]
KINDS = ("special", "added", "plain")
END = "</s>"


def tokenizer_with(marks: tuple[str, ...], kind: str) -> Tokenizer:
    """A tiny tokenizer in which marks are special tokens, other added tokens, or text."""
    backend = tiny_tokenizers.byte_level()
    if kind == "special":
        backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    elif kind == "added":
        backend.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in marks])
    stop = backend.token_to_id(END)
    return Tokenizer(backend, {}, None, frozenset({stop}), backend.get_vocab_size())


@pytest.fixture(scope="module")
def made() -> dict[tuple[str, str], tuple[Tokenizer, Vocabulary]]:
    return {}


def with_vocabulary(made, name: str, kind: str) -> tuple[Tokenizer, Vocabulary]:
    marks = FORMATS[name].marks or (harmony.MARKS if name in ("harmony", "atem") else ())
    if name == "atem":
        marks = harmony.MARKS
    key = (" ".join(marks), kind)
    if key not in made:
        tokenizer = tokenizer_with(marks, kind)
        made[key] = tokenizer, Vocabulary(tokenizer.backend, tokenizer.rows, tokenizer.stop_ids)
    return made[key]


def accepts(made, name: str, kind: str, wanted: Grammar, text: str) -> bool:
    tokenizer, vocabulary = with_vocabulary(made, name, kind)
    matcher = grammar.matcher(wanted, vocabulary.tokens)
    ids = tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar_of(made, name: str, kind: str, choice: str = "required", tools=TOOLS, parallel: bool = True) -> Grammar:
    tokenizer, _ = with_vocabulary(made, name, kind)
    return FORMATS[name].grammar(tools, choice, tokenizer.grammar_tokens, parallel)


def whole(given: dict[str, Any]) -> Call:
    return "weather", given


GOOD: list[Call] = [
    whole({"city": "Paris", "days": 3}),
    whole({"city": "", "days": 14, "unit": "C"}),
    whole({"city": "日本é", "days": 1, "unit": 'it\'s "warm"', "exact": True}),
    whole({"city": "a b", "days": 2, "exact": False, "tags": [], "range": {"low": 2}}),
    whole({"city": "x", "days": 9, "tags": ["a", "b c"], "note": "n"}),
    whole({"city": "x", "days": 9, "note": None}),
    ("no_arguments", {}),
]
BAD: list[Call] = [
    whole({"city": "Paris"}),
    whole({"days": 3}),
    whole({"city": "Paris", "days": 15}),
    whole({"city": "Paris", "days": 2.5}),
    whole({"city": "Parisian", "days": 3}),
    whole({"city": "Paris", "days": 3, "unit": "K"}),
    whole({"city": "Paris", "days": 3, "exact": "maybe"}),
    whole({"city": "Paris", "days": 3, "tags": ["abcd"]}),
    whole({"city": "Paris", "days": 3, "tags": ["a", "b", "c"]}),
    whole({"city": "Paris", "days": 3, "range": {"low": 4}}),
    whole({"city": "Paris", "days": 3, "range": {}}),
    whole({"city": "Paris", "days": 3, "extra": 1}),
    ("unknown", {}),
    ("no_arguments", {"x": 1}),
]


def written(name: str, calls: list[Call]) -> str:
    """The calls behind what a reply has before: `harmony` and `atem` are messages."""
    text = WRITERS[name](calls)
    if name == "harmony":
        return text.removesuffix("<|call|>")
    if name == "atem":
        one = (f" to={call[0]}<|message|>{WRITERS[name]([call])}" for call in calls)
        return "<|eom|><|start|>assistant".join(one)
    return text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_takes_calls_that_fit_and_no_others(made, name, kind):
    if name in ("harmony", "atem") and kind == "plain":
        pytest.skip("channels are made of tokens")
    wanted = grammar_of(made, name, kind)
    assert grammar.check(wanted) == []
    for call in GOOD:
        assert accepts(made, name, kind, wanted, written(name, [call])), call
    for call in BAD:
        assert not accepts(made, name, kind, wanted, written(name, [call])), call
    text = written(name, GOOD[:1])
    for broken in ("", text[:-1], f"Hm. {text}", text.replace('"', "", 1) if name != "qwen" else f"{text}."):
        assert not accepts(made, name, kind, wanted, broken) or broken == text


@pytest.mark.parametrize("name", FORMATS)
def test_parallel_calls_only_where_they_are_allowed(made, name):
    text, one = written(name, GOOD[:2]), written(name, GOOD[:1])
    many, single = (grammar_of(made, name, "special", parallel=parallel) for parallel in (True, False))
    named = grammar_of(made, name, "special", "weather")
    assert all(accepts(made, name, "special", each, one) for each in (many, single, named))
    assert accepts(made, name, "special", many, text) == (name != "harmony")
    assert not accepts(made, name, "special", single, text)
    assert not accepts(made, name, "special", named, text)
    assert not accepts(made, name, "special", named, written(name, [("no_arguments", {})]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", IN_TEXT)
def test_an_automatic_choice_leaves_text_free_and_holds_strict_tools(made, name, kind):
    if name == "atem" and kind == "plain":
        pytest.skip("channels are made of tokens")
    loose = Tool("loose", "", SCHEMA)
    wanted = grammar_of(made, name, kind, "auto", [WEATHER, loose])
    start = " to=user<|message|>" if name == "atem" else ""
    for text in ("", "Just text.", "1 < 2, and {x}", "é\n```\ncode\n```"):
        assert accepts(made, name, kind, wanted, start + text)
    good, bad = written(name, GOOD[:1]), written(name, BAD[:1])
    free = written(name, [("loose", {"other": 1})])
    before = "" if name == "atem" else "Let me see.\n"
    assert accepts(made, name, kind, wanted, before + good)
    assert accepts(made, name, kind, wanted, before + free)
    assert not accepts(made, name, kind, wanted, before + bad)
    if name != "atem":
        assert accepts(made, name, kind, wanted, f"{good}\nDone.")


def test_llama_s_bare_object_is_a_call_in_every_grammar(made):
    text = '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}'
    for choice in ("required", "weather", "auto"):
        wanted = grammar_of(made, "llama", "special", choice)
        assert accepts(made, "llama", "special", wanted, text)
        assert not accepts(made, "llama", "special", wanted, text.replace("3", "99"))


def test_gpt_oss_thinks_and_speaks_before_a_call(made):
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    said = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
    call, final = written("harmony", GOOD[:1]), "<|channel|>final<|message|>yes"
    required, auto = (grammar_of(made, "harmony", "special", choice) for choice in ("required", "auto"))
    for text in (call, thought + call, thought + thought + said + call):
        assert accepts(made, "harmony", "special", required, text)
        assert accepts(made, "harmony", "special", auto, text)
    assert accepts(made, "harmony", "special", auto, thought + final)
    assert not accepts(made, "harmony", "special", required, thought + final)


def test_a_command_model_may_frame_its_text(made):
    framed = "<|START_TEXT|>Let me see.<|END_TEXT|>"
    backend = tiny_tokenizers.byte_level()
    marks = [*FORMATS["action"].marks, "<|START_TEXT|>", "<|END_TEXT|>"]
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    tokenizer = Tokenizer(backend, {}, None, frozenset({backend.token_to_id(END)}), backend.get_vocab_size())
    made["action framed", "special"] = tokenizer, Vocabulary(backend, tokenizer.rows, tokenizer.stop_ids)
    wanted = FORMATS["action"].grammar([WEATHER], "auto", tokenizer.grammar_tokens)
    matcher = grammar.matcher(wanted, made["action framed", "special"][1].tokens)
    for text in ("Let me see.", framed, framed + written("action", GOOD[:1])):
        ids = tokenizer.encode(text)
        copy = matcher.deep_copy()
        assert copy.try_consume_tokens(ids) == len(ids)
        assert copy.is_accepting()


STRINGS = {  # schema of a string -> what fits, what does not
    '{"pattern": "^[a-z]+$"}': (["abc"], ["", "ABC", "abc1", "ab c"]),
    '{"pattern": "b/c"}': (["b/c", "ab/cd"], ["bc", ""]),
    '{"minLength": 2, "maxLength": 3}': (["ab", "日本語"], ["a", "abcd"]),
    '{"const": "a\\"b"}': (['a"b'], ["ab"]),
    '{"enum": ["x", "y\\nz"]}': (["x", "y\nz"], ["z"]),
}


@pytest.mark.parametrize("name", [each for each in FORMATS if each not in ("python", "atem", "harmony")])
@pytest.mark.parametrize("schema", STRINGS)
def test_what_a_schema_says_of_strings_holds_in_every_notation(made, name, schema):
    own = {"type": "string", **json.loads(schema)}
    tool = Tool("t", "", {"type": "object", "properties": {"s": own}, "required": ["s"]}, strict=True)
    wanted = grammar_of(made, name, "special", tools=[tool])
    good, bad = STRINGS[schema]
    for fitting, texts in ((True, good), (False, bad)):
        for text in texts:
            assert accepts(made, name, "special", wanted, written(name, [("t", {"s": text})])) == fitting, text


def test_a_schema_that_refers_to_itself_holds_in_every_notation(made):
    again = {"$ref": "#/$defs/tree"}
    tree = {"type": "object", "properties": {"left": again, "n": {"type": "integer"}}, "required": ["n"]}
    schema = {"type": "object", "properties": {"root": again}, "required": ["root"], "$defs": {"tree": tree}}
    tool = Tool("t", "", schema, strict=True)
    for name in FORMATS:
        wanted = grammar_of(made, name, "special", tools=[tool])
        good, bad = ({"root": {"left": {"left": {"n": 1}, "n": 2}, "n": each}} for each in (3, "3"))
        assert accepts(made, name, "special", wanted, written(name, [("t", good)])), name
        assert not accepts(made, name, "special", wanted, written(name, [("t", bad)])), name


# ---- walks over masks


def walk(tokenizer: Tokenizer, vocabulary: Vocabulary, wanted: Grammar, draw: random.Random) -> str:
    """The text of a reply of random tokens that the masks allow."""
    constraint, ids = GrammarConstraint(wanted, vocabulary), []
    closing = {tokenizer.backend.token_to_id("]"), *tokenizer.grammar_tokens.values()}
    names = set(tokenizer.grammar_tokens.values())
    for _ in range(1500):
        words = enumerate(constraint.mask().tolist())
        allowed = [WORD * place + bit for place, word in words if word for bit in range(WORD) if word >> bit & 1]
        ends = [id for id in allowed if id in vocabulary.stop_ids]
        if ends and (len(allowed) == len(ends) or draw.random() < 0.3 or len(ids) > 150):
            return tokenizer.backend.decode(ids, skip_special_tokens=False)
        marks = [id for id in allowed if id in (closing if len(ids) > 150 else names) and id not in vocabulary.stop_ids]
        plain = [id for id in allowed if id not in vocabulary.stop_ids]
        id = draw.choice(marks if marks and draw.random() < (0.9 if len(ids) > 150 else 0.3) else plain)
        ids.append(id)
        constraint.accept(id)
    raise AssertionError(tokenizer.backend.decode(ids, skip_special_tokens=False))


def fits(node: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """Whether a value matches a schema of the keywords that are used here."""
    if "$ref" in node:
        return fits(root["$defs"][node["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in node:
        return any(fits(each, value, root) for each in node["anyOf"])
    if "enum" in node:
        return any(type(value) is type(each) and value == each for each in node["enum"])
    if node["type"] == "object":
        named = node.get("properties", {})
        return (
            isinstance(value, dict) and set(value) <= set(named) and set(node.get("required", ())) <= set(value)
            and all(fits(named[key], each, root) for key, each in value.items())
        )  # fmt: skip
    if node["type"] == "array":
        return len(value) <= node["maxItems"] and all(fits(node["items"], each, root) for each in value)
    if node["type"] == "string":
        return isinstance(value, str) and len(value) <= node["maxLength"]
    if node["type"] == "integer":
        return type(value) is int and node["minimum"] <= value <= node["maximum"]
    return value is None if node["type"] == "null" else isinstance(value, bool)


def check_walk(name: str, text: str) -> None:
    form = FORMATS[name]
    if name in ("harmony", "atem"):
        stream = form.stream(TOOLS)
        for message in text.split("<|start|>assistant"):
            header, _, said = message.partition("<|message|>")
            if "analysis" not in header and "to=" in header and "to=self" not in header:
                recipient = header.partition("to=")[2].partition("<")[0].strip()
                stream.push_message(recipient, said.removesuffix("<|eom|>"))
        left, calls = "", [(call.name, json.loads(call.arguments)) for call in stream.calls]
    else:
        left, calls = read(form, [text], TOOLS)
    assert left == "", text
    assert calls, text
    for called, given in calls:
        schema = {"weather": SCHEMA, "no_arguments": NONE.parameters}[called]
        assert fits(schema, given, schema), text


@pytest.mark.parametrize("name", FORMATS)
def test_every_random_walk_ends_in_calls_that_fit(made, name):
    kind = "special"
    tokenizer, vocabulary = with_vocabulary(made, name, kind)
    draw = random.Random(name)
    for choice, parallel in (("required", True), ("weather", False), ("required", False)):
        wanted = grammar_of(made, name, kind, choice, parallel=parallel)
        for _ in range(4):
            check_walk(name, walk(tokenizer, vocabulary, wanted, draw))


@pytest.mark.parametrize("name", ["hermes", "qwen", "gemma", "python"])
def test_walks_over_the_vocabulary_of_a_real_model(name):
    tokenizer = Tokenizer.load(open_model(smollm2()))
    vocabulary = Vocabulary(tokenizer.backend, tokenizer.rows, tokenizer.stop_ids)
    wanted = FORMATS[name].grammar(TOOLS, "required", tokenizer.grammar_tokens)
    draw = random.Random(name)
    for _ in range(3):
        check_walk(name, walk(tokenizer, vocabulary, wanted, draw))


# ---- what is refused


@pytest.mark.parametrize("kind", KINDS[:2])
def test_tokens_of_a_grammar_are_those_that_llguidance_takes_as_special(made, kind):
    tokenizer, vocabulary = with_vocabulary(made, "gemma", kind)
    special = {id for id in range(tokenizer.rows) if vocabulary.tokens.is_special_token(id)}
    no_text = tokenizer.backend.token_to_id("ÿ")  # GPT-2's letter for the byte 255, which is in no text
    assert special - {no_text} == set(tokenizer.grammar_tokens.values())


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, '"not" at #/properties/a is not supported'),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, '"uniqueItems"'),
    ],
)
def test_a_strict_schema_that_no_grammar_enforces_is_refused(parameters, said):
    for form in FORMATS.values():
        with pytest.raises(LocalqError, match="tool t") as caught:
            form.grammar([Tool("t", "", parameters, strict=True)])
        assert said in str(caught.value)
        assert caught.value.exit_code == ExitCode.USAGE
        assert grammar.check(form.grammar([Tool("t", "", parameters)])) == []


@pytest.mark.parametrize("own", [{"pattern": "(?=x)"}, {"pattern": "("}, {"minItems": "x", "type": "array"}])
def test_what_no_grammar_can_read_is_ignored_for_a_tool_that_is_not_strict(own):
    tool = Tool("t", "", {"type": "object", "properties": {"a": {"type": "string", **own}}})
    for name, form in FORMATS.items():
        if "minItems" not in own or name in ("gemma", "python"):
            assert grammar.check(form.grammar([tool])) == [], name


def test_a_choice_of_no_tool_is_refused():
    for choice, tools in (("other", TOOLS), ("auto", [])):
        with pytest.raises(LocalqError, match="tool choice") as caught:
            FORMATS["hermes"].grammar(tools, choice)
        assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("name", ["qwen", "gemma", "python", "glm", "atem"])
def test_a_parameter_that_a_form_cannot_write_is_refused(name):
    tool = Tool("t", "", {"type": "object", "properties": {'a<b>,"\n': {"type": "string"}}}, strict=True)
    with pytest.raises(LocalqError, match="cannot represent the parameter name"):
        FORMATS[name].grammar([tool])


def test_a_hundred_tools_make_a_grammar_that_compiles(made):
    tools = [Tool(f"tool_{number}", "x" * 200, SCHEMA, strict=True) for number in range(100)]
    for name in ("hermes", "qwen"):
        wanted = grammar_of(made, name, "special", tools=tools)
        assert accepts(made, name, "special", wanted, written(name, [("tool_99", GOOD[0][1])]))
