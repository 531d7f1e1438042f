"""Files of `localq run`, by @FILE and -f FILE; and what it says of an answer that a limit ended."""

from __future__ import annotations

import contextlib
import io
import json
import sys

import pytest

from localq.chat import open_model
from localq.chat.reply_limits import ANSWER_TOKENS
from localq.chat.session import ChatSession
from localq.cli import execute
from localq.planner.load_options import LoadOptions
from localq.settings import NO_LIMIT
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient

pytestmark = pytest.mark.usefixtures("own_folder")
MODEL = "smollm2-135m"
NUMBERS = " ".join(map(str, range(2000)))


@pytest.fixture
def run(monkeypatch, capsys):
    """`localq run smollm2-135m ARGUMENTS` over a scripted engine: (exit code, stdout, stderr, prompts)."""

    def run(*arguments: str, answer: str = "fine", stdin: str = "", terminal: bool = False, template: bool = True):
        client = ScriptedClient([answer], context_size=100_000)

        @contextlib.contextmanager
        def open_session(name, settings, watcher, wanted):
            tokenizer = CharTokenizer()
            tokenizer.chat_template = "scripted" if template else None
            session = ChatSession(client, Load("path", LoadOptions(name)), tokenizer)
            session.max_tokens, session.loop_guard = settings.max_tokens, settings.loop_guard
            yield open_model.OpenSession(session, client)

        monkeypatch.setattr(open_model, "open_session", open_session)
        monkeypatch.setattr(sys, "stdin", type("Stdin", (io.StringIO,), {"isatty": lambda self: terminal})(stdin))
        capsys.readouterr()
        return execute(["run", MODEL, *arguments, "--no-stats"]), *capsys.readouterr(), client.prompts

    return run


@pytest.fixture
def files(own_folder):
    (own_folder / "a.txt").write_text("alpha")
    (own_folder / "b c.txt").write_text("beta")
    (own_folder / "data.bin").write_bytes(b"\0")
    return own_folder


def test_files_are_attached_as_in_a_chat(run, files):
    code, out, err, prompts = run('compare @a.txt and @"b c.txt"')
    assert (code, out) == (0, "fine\n")
    assert prompts == ['<user>a.txt:\n\nalpha\n\nb c.txt:\n\nbeta\n\ncompare @a.txt and @"b c.txt"<assistant>']
    assert err == "(attached a.txt · 5 B · 13 tokens)\n(attached b c.txt · 4 B · 14 tokens)\n"
    assert run("-q", "see @a.txt")[2] == ""


def test_an_option_attaches_a_file_and_may_be_repeated(run, files):
    for options in (["-f", "a.txt", "--file", "b c.txt"], ["-f", str(files / "a.txt"), "-f", "./b c.txt"]):
        prompts = run(*options, "compare", stdin="piped @a.txt\n")[-1]
        assert prompts == ["<user>a.txt:\n\nalpha\n\nb c.txt:\n\nbeta\n\npiped @a.txt\n\ncompare<assistant>"]


def test_files_alone_are_a_prompt_where_nothing_is_typed(run, files):
    assert run("-f", "a.txt")[-1] == ["<user>a.txt:\n\nalpha<assistant>"]
    code, _, err, prompts = run("-f", "a.txt", terminal=True)
    assert (code, prompts) == (2, [])
    assert "--file: cannot be used without a prompt. Pass a prompt" in err


def test_a_base_model_continues_the_file(run, files):
    assert run("-f", "a.txt", "and", template=False)[-1] == ["a.txt:\n\nalpha\n\nand"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-f", "none.txt", "x"], "none.txt: cannot be read (No such file or directory)"),
        (["-f", "data.bin", "x"], "data.bin: not a text file"),
        (["-f", ".", "x"], ".: cannot be read (Is a directory)"),
        (["what is @data.bin"], "@data.bin: not a text file"),
    ],
)
def test_a_file_that_cannot_be_attached_is_an_error_before_a_model_is_opened(run, files, arguments, said):
    code, out, err, prompts = run(*arguments)
    assert (code, out, prompts) == (2, "", [])
    assert said in err


@pytest.mark.parametrize("text", ["mail me@a.txt", "@dataclass", "ask @nobody.txt", "a @ b", "in @sub/"])
def test_an_at_that_names_no_file_stays_text(run, files, text):
    assert run(text)[-1] == [f"<user>{text}<assistant>"]


# ---- what ended the answer


def test_the_default_length_is_named_and_no_failure(run):
    code, out, err, _ = run("x", answer=NUMBERS)
    assert (code, len(out)) == (0, ANSWER_TOKENS + 1)
    assert err == "stopped at the default limit of 4,096 tokens; change it with -n TOKENS or -n max\n"
    code, out, _, _ = run("x", "--json", answer=NUMBERS)
    body = json.loads(out)
    assert (code, body["reason"], body["stats"]["generated_tokens"]) == (0, "default_length", ANSWER_TOKENS)
    assert len(body["text"]) == ANSWER_TOKENS


def test_a_longer_answer_may_be_asked_for(run):
    for options in (["-n", "8k"], ["-n", "max"], ["--max-tokens", "MAX"]):
        code, out, err, _ = run("x", *options, answer=NUMBERS)
        assert (code, out, err) == (0, f"{NUMBERS}\n", "")


def test_a_repetition_is_named_and_no_failure(run):
    text = "and so it goes on " * 400
    code, out, err, _ = run("x", answer=text)
    assert code == 0
    assert 1536 <= len(out) <= 1700
    assert err.startswith("stopped: the last 18 tokens were repeated ")
    assert err.endswith(" times; --no-loop-guard disables this check\n")
    assert json.loads(run("x", "--json", answer=text)[1])["reason"] == "repetition"
    assert run("x", "--no-loop-guard", "-n", "max", answer=text)[1].strip() == text.strip()


def test_a_constrained_answer_that_is_cut_is_a_failure(run):
    code, _, err, _ = run("x", "--json-schema", "json", answer='["' + NUMBERS)
    assert code == 1
    assert "cut after 4096 tokens; the answer does not match the JSON schema. Raise --max-tokens" in err


def test_both_are_settings(run, monkeypatch, capsys):
    monkeypatch.setenv("LOCALQ_LOOP_GUARD", "off")
    monkeypatch.setenv("LOCALQ_MAX_TOKENS", "max")
    text = "and so it goes on " * 400
    assert run("x", answer=text)[1].strip() == text.strip()
    monkeypatch.delenv("LOCALQ_MAX_TOKENS")
    assert execute(["config", "set", "max_tokens", "max"]) == 0
    assert execute(["config", "get", "max_tokens"]) == 0
    assert capsys.readouterr().out.endswith("max_tokens = max\nmax\n")
    assert execute(["config", "get", "max_tokens", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == NO_LIMIT
    assert execute(["config", "set", "seed", str(NO_LIMIT)]) == 0
    assert capsys.readouterr().out == f"seed = {NO_LIMIT}\n"
