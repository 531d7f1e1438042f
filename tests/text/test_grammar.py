"""What answers keep to, before there is a model: what users write, what is wrong with it, and that it is found soon."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localq.chat.history.record import ChatSettings
from localq.chat.session import ChatSession
from localq.disk import read_text
from localq.errors import ExitCode, LocalqError
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from localq.text import grammar
from localq.text.grammar import Grammar, check
from localq.worker import messages
from localq.worker.messages import Generate, Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient

ANDED = "start: A\nA: " + " & ".join(f"/.*a{number}.*/" for number in range(17))  # 2^17 states
WRONG = [
    ("json_schema", "{", "the JSON schema: not valid JSON"),
    ("json_schema", '{\n"type": }', "line 2 column 9"),
    ("json_schema", "[]", "schema must be an object or boolean"),
    ("json_schema", "false", "Unsatisfiable"),
    ("json_schema", '{"type": "bogus"}', "Invalid type: bogus"),
    ("json_schema", '{"not": {}}', '"not" at # is not supported. Remove the keyword, or add "x-guidance": '),
    ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "minLength (5) is greater than maxLength"),
    ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "incompatible types"),
    ("json_schema", '{"enum": []}', "Unsatisfiable"),
    ("json_schema", '{"$ref": "#/nowhere"}', "does not exist"),
    ("json_schema", '{"$ref": "#"}', "no reply can match it. Relax the JSON schema"),
    ("json_schema", '{"$ref": "http://127.0.0.1:1/x"}', "does not fetch resources"),
    ("json_schema", '{"$ref": "file:///etc/passwd"}', "does not fetch resources"),
    ("json_schema", '{"type": "string", "pattern": "("}', "unclosed group"),
    ("json_schema", '{"x-guidance": {"nope": 1}}', "unknown field `nope`"),
    ("json_schema", '{"x-guidance": 3}', "invalid type"),
    ("json_schema", '{"const": "\\ud800"}', "hex escape"),
    ("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000, "the JSON schema"),
    ("json_schema", '{"a":' + " " * 2**18 + "1}", "too large (limit: 256 KiB)"),
    ("regex", "(", "the regular expression: unclosed group. Fix the regular expression"),
    ("regex", "(?=a)b", "look-ahead"),
    ("regex", r"(a)\1", "backreferences are not supported"),
    ("regex", r"\bfoo\b", "lookarounds not supported"),
    ("regex", "[a&&b]", "no reply can match it"),
    ("regex", "a" * 2**16 + "a", "too large (limit: 64 KiB)"),
    ("regex", "\udc80", "not valid text"),
    ("lark", "", "Empty grammar"),
    ("lark", "hello", "line 1, column 6: Expected token ':'"),
    ("lark", 'foo: "a"', "no start rule found"),
    ("lark", "start: foo", 'line 1, column 8: unknown name: "foo"'),
    ("lark", 'start: start "a"', "no reply can match it"),
    ("lark", "start: " + "(" * 5000, "too deeply nested"),
    ("lark", "\n".join(["start: A0"] + [f"A{n}: A{n + 1} A{n + 1}" for n in range(40)] + ['A40: "x"']), "too big"),
    ("lark", 'start: "a"\n\x1b[31m: foo', "the grammar: line 2, column 1: lexer error"),
    ("gbnf", 'x ::= "a"', "the rule `root` is missing"),
    ("gbnf", "root ::= foo", "line 1: unknown rule `foo`"),
    ("gbnf", 'root ::= "a"\nroot ::= "b"', "line 2: the rule `root` is defined twice"),
    ("gbnf", 'root ::= "a" b ::= "c"', "must start on a new line"),
    ("gbnf", '"a"', "expected a rule"),
    ("gbnf", 'root ::= "a', "syntax error at"),
    ("gbnf", "root ::= []", "empty character class"),
    ("gbnf", "root ::= [z-a]", "invalid range z-a"),
    ("gbnf", 'root ::= "\\q"', "unknown escape \\q"),
    ("gbnf", 'root ::= "\\ud800"', "is not a valid character"),
    ("gbnf", 'root ::= ("a"', "missing )"),
    ("gbnf", 'root ::= "a")', "unexpected )"),
    ("gbnf", 'root ::= | *', "nothing to repeat before *"),
    ("gbnf", 'root ::= root "a"', "no reply can match it"),
    ("yaml", "a: b", "unknown kind of grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "said"), WRONG)
def test_what_is_wrong_is_a_usage_error_in_one_line_found_soon(kind, text, said):
    started = time.process_time()
    with pytest.raises(LocalqError) as caught:
        check(Grammar(kind, text))
    assert time.process_time() - started < 5
    assert said in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_what_takes_too_long_to_build_is_refused(monkeypatch):
    monkeypatch.setattr(grammar, "MAX_SECONDS", 0.05)
    with pytest.raises(LocalqError, match="the grammar: compilation takes more than 0 s") as caught:
        check(Grammar("lark", ANDED))
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{}"),
        ("json_schema", "true"),
        ("json_schema", '{"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "title": "x"}'),
        ("json_schema", '{"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}'),
        ("regex", "^a+$"),
        ("regex", "a|ü"),
        ("lark", 'start: "a" | %json {"type": "integer"}'),
        ("lark", "start: <|im_end|>"),  # which only a model can tell
        ("gbnf", 'root ::= "a" root | ""'),
    ],
)
def test_what_is_right_passes_without_a_word(kind, text):
    assert check(Grammar(kind, text)) == []


def test_what_a_lenient_schema_ignores_is_told():
    text = '{"type": "object", "not": {}, "x-guidance": {"lenient": true}}'
    assert check(Grammar("json_schema", text)) == ['"not" (at #) is not enforced']


def test_whether_what_was_cut_is_whole():
    assert grammar.matches(Grammar("regex", "[a-zü]+"), "süß".replace("ß", "u"))
    assert not grammar.matches(Grammar("regex", "a{3}"), "aa")
    assert not grammar.matches(Grammar("regex", "a{3}"), "aaaa")
    assert grammar.matches(Grammar("json_schema", "{}"), '{"a": [1, "今天"]}')
    assert not grammar.matches(Grammar("json_schema", "{}"), '{"a": [1, "今')
    assert not grammar.matches(Grammar("lark", "start: <|im_end|>"), "")


def test_what_users_write(tmp_path):
    schema = tmp_path / "a schema: mine.json"
    schema.write_text('\ufeff{"type": "null"}')
    assert grammar.json_schema(' {"a": 1}') == Grammar("json_schema", ' {"a": 1}')
    assert grammar.json_schema("json") == Grammar("json_schema", "{}")
    assert (
        grammar.json_schema(str(schema))
        == grammar.json_schema(f"@{schema}")
        == Grammar("json_schema", '{"type": "null"}')
    )
    rules = tmp_path / "rules"
    rules.write_text('# a comment: x ::= y\nroot  ::= "é"')
    assert grammar.grammar(str(rules)) == Grammar("gbnf", rules.read_text())
    assert grammar.grammar(f"@{rules}").kind == "gbnf"
    assert grammar.grammar('start: "::="').kind == "lark"
    assert grammar.regex("@x") == Grammar("regex", "@x")
    for value in (str(tmp_path), str(tmp_path / "missing"), "@", ""):
        with pytest.raises(LocalqError, match="cannot be read") as caught:
            grammar.grammar(value)
        assert caught.value.exit_code == ExitCode.USAGE
    rules.write_bytes(b"\xff\xfe: x")
    with pytest.raises(LocalqError, match="not valid UTF-8"):
        grammar.grammar(str(rules))


def test_a_grammar_from_what_is_no_text_file_neither_waits_nor_fills_the_memory(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(LocalqError, match="not a regular file"):
            grammar.grammar(f"@{name}")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rules").write_text('start: "a"')
    assert grammar.grammar("@~/rules") == Grammar("lark", 'start: "a"')


def test_a_mark_of_the_byte_order_is_no_part_of_a_grammar():
    assert grammar.grammar("\ufeffroot ::= [a]") == Grammar("gbnf", "root ::= [a]")
    assert grammar.json_schema("\ufeff{}") == Grammar("json_schema", "{}")


def test_one_line_for_people_holds_no_control_characters():
    assert str(Grammar("lark", 'start:\n  "\x1b[2J"' + "a" * 90)) == f'lark start: "[2J"{"a" * 48}...'


def test_messages_and_sessions_keep_a_grammar_and_old_sessions_have_none():
    for chosen in (Grammar("regex", "é+"), None):
        request = Generate(1, [2], grammar=chosen, grammar_begun="é")
        assert messages.decode(messages.encode(request)) == request
        settings = ChatSettings(Sampling(), grammar=chosen)
        assert ChatSettings.from_dict(json.loads(json.dumps(dataclasses.asdict(settings)))) == settings
    assert ChatSettings.from_dict({"sampling": {}, "max_tokens": None, "stop": []}).grammar is None
    line = messages.encode(Generate(1, [2])).replace(b'"grammar":null', b'"grammar":{"kind":"x","text":""}')
    with pytest.raises(LocalqError, match="unknown kind"):
        messages.decode(line)


class ThinkingTokenizer(CharTokenizer):
    """The template of a model that always thinks."""

    def chat_text(self, messages: list[dict[str, str]], **variables: object) -> str:
        return super().chat_text(messages) + "<think>\n"


def test_the_engine_is_told_where_a_grammar_begins():
    wanted = Grammar("regex", "[a-z]+")
    told = []
    for tokenizer, script in ((CharTokenizer(), ["ab"]), (ThinkingTokenizer(), ["hm</think>", "ab"])):
        client = ScriptedClient(script)
        *_, reply = ChatSession(client, Load("path", LoadOptions("model")), tokenizer, grammar=wanted).ask("x")
        assert reply.text == "ab"
        told += [(each.grammar, each.grammar_begun, each.grammar_after) for each in client.generated]
    assert told == [(wanted, "", ""), (wanted, "", "</think>")]


def test_a_front_end_without_a_grammar_never_imports_llguidance():
    code = (
        "import sys, localq.cli.verbs.run, localq.cli.verbs.chat, localq.chat.session, localq.chat.commands;"
        "print('llguidance' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert result.stdout == "False\n"


def test_a_pipe_that_the_shell_has_opened_is_a_file():
    """--json-schema <(jq .schema FILE)"""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(b'{"type": "integer"}')
    try:
        assert read_text(Path(f"/dev/fd/{reader}")) == '{"type": "integer"}'
    finally:
        os.close(reader)
