"""--json-schema, --grammar, --regex and /grammar as a user meets them: real processes over a tiny model."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from localq.cli import execute
from tests.support.cli.cli_processes import environment_of, localq, localq_typed
from tests.support.models.tiny_checkpoints import make_checkpoint

SCHEMA = """{"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
             "required": ["n"], "additionalProperties": false}"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("home")
    return {**environment_of(folder, make_checkpoint(folder / "tiny", initializer_range=0.15)), "TERM": "dumb"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return localq(environment, "run", environment["LOCALQ_MODEL"], "Hi", *arguments)


def test_run_prints_exactly_the_json(environment, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(SCHEMA)
    result = run(environment, "--json-schema", str(schema), "--temp", "1", "--seed", "4", "--quiet")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    body = json.loads(result.stdout)
    assert list(body) == ["n"]
    assert 0 <= body["n"] <= 99


def test_json_that_is_cut_is_a_failure_that_says_so(environment):
    result = run(environment, "--json-schema", SCHEMA, "-n", "2", "--quiet")
    assert result.returncode == 1
    assert "the reply: cut after 2 tokens; the answer does not match the JSON schema. Raise" in result.stderr
    assert result.stdout.startswith("{")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json-schema", '{"type": "bogus"}'], "the JSON schema: Invalid type: bogus. Fix the JSON schema."),
        (["--json-schema", "no-such-file.json"], "no-such-file.json: cannot be read"),
        (["--grammar", "root ::= x"], "the grammar: line 1: unknown rule `x`. Fix the grammar."),
        (["--regex", "("], "the regular expression: unclosed group. Fix the regular expression."),
        (["--regex", "a", "--grammar", 'start: "a"'], "--regex: cannot be combined with --grammar."),
    ],
)
def test_what_is_wrong_ends_with_2_before_a_model_is_looked_for(capsys, arguments, said):
    for verb in (["run", "no-such-model", "Hi"], ["chat", "no-such-model"]):
        assert execute([*verb, *arguments]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1


def test_a_chat_keeps_its_grammar_and_takes_another(environment):
    lines = "Hi\n/grammar\n/regen\n/grammar json [1\n/grammar nonsense\n/grammar gbnf root ::= [xyz]{4}\nHi\n"
    result = localq_typed(environment, "chat", "--regex", "[0-9]{3}!", "--no-stats", lines=lines)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"([0-9]{3}!\n){2}[xyz]{4}\n", result.stdout), result.stdout
    assert "answers are now constrained by regex [0-9]{3}!\n" in result.stderr
    assert "[1: cannot be read" in result.stderr
    assert "Use /grammar json" in result.stderr
    assert "answers are now constrained by gbnf root ::= [xyz]{4}\n" in result.stderr
    result = localq_typed(environment, "chat", "--continue", "--no-stats", lines="Hi\n/grammar off\n/grammar\n")
    assert re.fullmatch(r"[xyz]{4}\n", result.stdout), result.stdout
    assert "no grammar" in result.stderr
