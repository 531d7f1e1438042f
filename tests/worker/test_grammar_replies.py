"""Replies of real engines keep to what was asked for: models with random weights, and SmolLM2-135M."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from localq.chat.reply import Reply, ReplyPiece
from localq.chat.session import ChatSession
from localq.errors import ExitCode, LocalqError
from localq.sampling import Sampling
from localq.text.grammar import Grammar, grammar, json_schema, regex
from tests.support.files.real_model import smollm2
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.worker.in_process_client import session_over

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", "今天"]}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST = """
root ::= item{2,3}
item ::= "- " [A-Z] [a-z]{1,6} tail? "\\n"
tail ::= " (" ("é" | "今" | [0-9]){1,3} ")"
"""


def keeps_to(value: Any, schema: dict[str, Any]) -> bool:
    """What PERSON needs of JSON Schema."""
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(known)
            and all(keeps_to(each, known[name]) for name, each in value.items())
        )
    if schema["type"] == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(keeps_to(each, schema["items"]) for each in value)
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if schema["type"] == "boolean":
        return isinstance(value, bool)
    return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]


def test_the_checker_of_these_tests_can_say_no():
    good = {"name": "Ada", "age": 36, "tags": ["red"]}
    assert keeps_to(good, PERSON)
    wrong = [{"name": "A"}, {"age": 151}, {"age": "36"}, {"age": True}, {"tags": []}, {"tags": ["blue"]}, {"ok": 1}]
    assert not any(keeps_to({**good, **each}, PERSON) for each in [*wrong, {"more": 1}])
    assert not keeps_to({"name": "Ada", "age": 36}, PERSON)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> ChatSession:
    return session_over(make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", initializer_range=0.15))


@pytest.fixture
def session(tiny) -> ChatSession:
    tiny.clear()
    tiny.sampling, tiny.max_tokens, tiny.stop_strings, tiny.grammar = Sampling(), None, (), None
    return tiny


def answer(session: ChatSession, wanted: Grammar, sampling: Sampling, text: str = "Hi") -> Reply:
    """The reply to `text` in a conversation of its own; its pieces are its text."""
    session.clear()
    session.grammar, session.sampling = wanted, sampling
    parts = list(session.ask(text))
    reply = parts[-1]
    assert isinstance(reply, Reply)
    assert "".join(part.text for part in parts if isinstance(part, ReplyPiece)) == reply.text
    return reply


@pytest.mark.parametrize("temperature", [0.0, 0.7, 3.0])
def test_json_of_a_random_model_always_parses_and_keeps_to_the_schema(session, temperature):
    wanted = json_schema(json.dumps(PERSON))
    texts = set()
    for seed in range(8 if temperature else 1):
        reply = answer(session, wanted, Sampling(temperature=temperature, seed=seed))
        assert reply.reason == "stop"
        assert keeps_to(json.loads(reply.text), PERSON), reply.text
        texts.add(reply.text)
    assert len(texts) == (8 if temperature else 1)


def test_letters_of_several_bytes_are_whole_in_json_strings(session):
    wanted = json_schema('{"type": "string", "pattern": "^[À-ÿ今天🙂]{3,9}$"}')
    for seed in range(6):
        reply = answer(session, wanted, Sampling(temperature=2.0, seed=seed))
        assert re.fullmatch("[À-ÿ今天🙂]{3,9}", json.loads(reply.text)), reply.text


@pytest.mark.parametrize("pattern", [r"(yes|no), [a-z ]{3,12}\.", r"\d{4}-\d\d-\d\d", "[ä-ü€]{2,5}(?i:ok)?", "a|b"])
def test_a_reply_to_a_pattern_matches_as_a_whole(session, pattern):
    for seed in range(4):
        reply = answer(session, regex(pattern), Sampling(temperature=1.5, seed=seed))
        assert reply.reason == "stop"
        assert re.fullmatch(pattern, reply.text), reply.text


def test_a_reply_to_gbnf_and_to_lark(session):
    for seed in range(4):
        reply = answer(session, grammar(LIST), Sampling(temperature=1.5, seed=seed))
        lines = reply.text.splitlines()
        assert len(lines) in (2, 3)
        assert all(re.fullmatch(r"- [A-Z][a-z]{1,6}( \([é今0-9]{1,3}\))?", line) for line in lines), reply.text
        reply = answer(session, grammar('start: "<" /[a-f]+/ ">"'), Sampling(temperature=1.5, seed=seed))
        assert re.fullmatch("<[a-f]+>", reply.text)


def test_what_is_cut_says_so_and_is_gone_on_with_to_its_end(session):
    wanted = json_schema(json.dumps(PERSON))
    session.max_tokens = 9
    reply = answer(session, wanted, Sampling(temperature=1.0, seed=3))
    assert reply.reason == "length"
    assert reply.notices == (
        "stopped at the limit of 9 tokens (max_tokens); the answer is incomplete and does not match the JSON schema; "
        "/continue resumes",
    )
    with pytest.raises(ValueError, match="line"):
        json.loads(reply.text)
    session.max_tokens = None
    *_, whole = session.continue_reply()
    assert whole.text.startswith(reply.text)
    assert keeps_to(json.loads(whole.text), PERSON)


def test_what_is_cut_where_it_could_end_is_whole(session):
    session.max_tokens = 6
    reply = answer(session, regex("[a-z]+"), Sampling(temperature=1.0, seed=1))
    said = "stopped at the limit of 6 tokens (max_tokens); /continue resumes"
    assert (reply.reason, reply.notices) == ("length", (said,))


def test_a_reply_that_is_stopped_is_kept_and_answered_anew_under_the_grammar_of_then(session):
    session.grammar, session.sampling = regex("[a-z]{200}"), Sampling(temperature=1.0, seed=1)
    for part in session.ask("Hi"):
        if isinstance(part, ReplyPiece) and part.text:
            session.stop()
    assert part.reason == "cancelled"
    assert re.fullmatch("[a-z]{1,30}", part.text)
    assert session.messages[-1].content == part.text
    session.grammar = regex("[0-9]{3}")
    *_, reply = session.regenerate()
    assert re.fullmatch("[0-9]{3}", reply.text)
    session.grammar = None
    session.max_tokens = 3
    *_, free = session.regenerate()
    assert free.reason == "length"


def test_a_stop_string_ends_a_reply_before_its_grammar_does(session):
    session.stop_strings = ("b",)
    reply = answer(session, regex("a{3}b{3}"), Sampling())
    assert (reply.text, reply.reason) == ("aaa", "stop")


def test_the_next_reply_is_free_of_the_grammar_of_the_last(session):
    session.max_tokens = 6
    session.sampling = Sampling(temperature=1.0, seed=2)
    *_, before = session.ask("Hi")
    answer(session, regex("[0-9]{3}"), session.sampling)
    session.clear()
    session.grammar = None
    *_, after = session.ask("Hi")
    assert after.text == before.text


def test_a_grammar_that_names_no_token_of_the_model_fails_and_the_chat_goes_on(session):
    session.grammar = Grammar("lark", 'start: <|nobody|> "a"')
    with pytest.raises(LocalqError, match="the grammar: line 1, column 8: unknown special token") as caught:
        list(session.ask("Hi"))
    assert caught.value.exit_code == ExitCode.USAGE
    assert answer(session, regex("ok"), Sampling()).text == "ok"


def test_smollm2_answers_in_json_and_by_a_pattern():
    real = session_over(smollm2())
    for seed, temperature in ((0, 0.0), (1, 1.0)):
        chosen = Sampling(temperature=temperature, seed=seed)
        reply = answer(real, json_schema(json.dumps(PERSON)), chosen, "Describe a person as JSON.")
        assert keeps_to(json.loads(reply.text), PERSON), reply.text
    reply = answer(real, regex(r"(Yes|No), [a-z ,]{4,20}\."), chosen, "Is water wet?")
    assert re.fullmatch(r"(Yes|No), [a-z ,]{4,20}\.", reply.text)
