"""One answer on the command line, by `run` or `chat -p` from a pipe: prompts, code, thoughts, and what is cut."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import stat
import sys

import pytest

from localq.chat import open_model
from localq.chat.history.record import Record
from localq.chat.history.store import ConversationStore
from localq.chat.session import ChatSession
from localq.cli import execute
from localq.cli.line import line_chat, thinking_lines
from localq.errors import ExitCode, LocalqError
from localq.planner.load_options import LoadOptions
from localq.settings import NO_LIMIT
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def answered(monkeypatch, capsys):
    """`localq ARGUMENTS` with this answer and this on stdin."""

    def answered(answer, *arguments: str, stdin: str = "", terminal: bool = False, reason: str = "stop"):
        pieces = [answer] if isinstance(answer, str) else answer
        client = answered.client = ScriptedClient(pieces, reason=reason, forced=2)

        @contextlib.contextmanager
        def open_session(name, settings, watcher, wanted):
            session = ChatSession(client, Load("path", LoadOptions(name)), CharTokenizer())
            session.system, session.think_budget = settings.system, settings.think_budget
            yield open_model.OpenSession(session, client)

        monkeypatch.setattr(open_model, "open_session", open_session)
        monkeypatch.setattr(sys, "stdin", type("Stdin", (io.StringIO,), {"isatty": lambda self: terminal})(stdin))
        capsys.readouterr()
        return execute(list(arguments)), *capsys.readouterr(), client.prompts

    return answered


def test_extract_prints_the_last_block_of_code_alone(answered):
    text = "First:\n```py\na = 1\n```\nthen\n```\nb = 2\nc\n```\nDone."
    code, out, _, _ = answered(text, "run", "smollm2-135m", "-x", "q")
    assert (code, out) == (0, "b = 2\nc\n")
    code, out, err, _ = answered("no code", "run", "smollm2-135m", "--extract", "q")
    assert (code, out) == (1, "")
    assert "no code block" in err


def test_the_prompt_may_be_an_option_as_of_chat(answered):
    *_, prompts = answered("a", "run", "smollm2-135m", "-p", "two words", stdin="piped\n")
    assert prompts == answered("a", "run", "smollm2-135m", "two words", stdin="piped\n")[-1]
    assert answered("a", "run", "-m", "smollm2-135m", "two", "--prompt", "words", stdin="piped\n")[-1] == prompts


def test_a_model_named_by_an_option_leaves_all_words_to_the_prompt(answered):
    *_, prompts = answered("a", "run", "-m", "smollm2-135m", "two", "words", stdin="piped\n")
    assert prompts == ["<user>piped\n\ntwo words<assistant>"]
    code, _, err, _ = answered("a", "chat", "smollm2-135m", "--model", "qwen3-8b")
    assert code == ExitCode.USAGE
    assert "cannot be combined with the MODEL argument, smollm2-135m" in err


def test_chat_with_a_prompt_from_a_pipe_answers_once(answered):
    code, out, _, prompts = answered("a", "chat", "smollm2-135m", "-p", "why?", stdin="text\n")
    assert (code, out, prompts) == (0, "a\n", ["<user>text\n\nwhy?<assistant>"])


def test_a_single_answer_of_chat_names_options_where_a_limit_ended_it(answered):
    numbers = " ".join(map(str, range(2000)))
    code, _, err, _ = answered(numbers, "chat", "smollm2-135m", "-p", "count", "--no-stats")
    assert code == 0
    assert "stopped at the default limit of 4,096 tokens; change it with -n TOKENS or -n max" in err


def test_what_is_piped_in_puts_no_files_into_the_prompt(answered, own_folder):
    (own_folder / "a.txt").write_text("secret")
    (own_folder / "b.txt").write_text("mine")
    *_, prompts = answered("a", "chat", "smollm2-135m", "-p", "and @b.txt", stdin="see @a.txt \\@b.txt\n")
    assert prompts == ["<user>see @a.txt \\@b.txt\n\nb.txt:\n\nmine\n\nand @b.txt<assistant>"]
    *_, prompts = answered("a", "chat", "smollm2-135m", "-p", "-", stdin="see @a.txt\n")
    assert prompts == ["<user>see @a.txt<assistant>"]


def test_a_dash_alone_stands_for_stdin_and_among_words_for_itself(answered):
    *_, prompts = answered("a", "run", "smollm2-135m", "-", stdin="piped\n")
    assert prompts == ["<user>piped<assistant>"]
    *_, prompts = answered("a", "run", "smollm2-135m", "2", "-", "1")
    assert prompts == ["<user>2 - 1<assistant>"]


def test_run_without_a_prompt_at_a_terminal_is_a_chat(answered, monkeypatch):
    lines = iter(["hi", "/exit"])
    monkeypatch.setattr(line_chat.Reader, "__call__", lambda _: next(lines))
    code, out, _, prompts = answered("a", "run", "smollm2-135m", terminal=True)
    assert (code, out, prompts) == (0, "a\n", ["<user>hi<assistant>"])


def test_thoughts_go_to_stderr_a_file_or_a_key_of_json(answered, tmp_path):
    reply = "<think>\nhmm\n</think>\n\nyes"
    code, out, err, _ = answered(reply, "run", "smollm2-135m", "q")
    assert (code, out) == (0, "yes\n")
    assert err.startswith("(thinking)\nhmm\n\n")
    _, out, err, _ = answered(reply, "run", "smollm2-135m", "-q", "q")
    assert (out, err) == ("yes\n", "")
    _, out, err, _ = answered(reply, "run", "smollm2-135m", "--think-out", "t", "q")
    assert "hmm" not in err
    assert "hmm" in (tmp_path / "t").read_text()
    _, out, err, _ = answered(reply, "run", "smollm2-135m", "--json", "q")
    assert '"text": "yes", "thought": "hmm"' in out
    assert "hmm" not in err


@pytest.mark.parametrize(("text", "tokens"), [("512", 512), ("4k", 4096), ("0", 0), ("max", NO_LIMIT)])
def test_a_thought_that_its_budget_stopped_is_said(answered, monkeypatch, text, tokens):
    reply, run = "<think>\nhmm\n</think>\n\nyes", ("run", "smollm2-135m", "q")
    code, out, err, _ = answered(reply, *run, "--think-budget", text)
    assert (code, out) == (0, "yes\n")
    assert f"thinking stopped at the limit of {tokens} tokens (think_budget)" in err
    assert answered.client.generated[0].think_budget == tokens
    _, out, err, _ = answered(reply, *run, "--think-budget", text, "--json")
    assert json.loads(out)["thought_stopped"] is True
    assert json.loads(out)["stats"]["forced_tokens"] == 2
    _, out, err, _ = answered(reply, *run, "--json")
    assert json.loads(out)["thought_stopped"] is False
    assert "think_budget" not in err
    monkeypatch.setenv("LOCALQ_THINK_BUDGET", text)
    answered(reply, "chat", "smollm2-135m", "-p", "q", "--no-save")
    assert answered.client.generated[0].think_budget == tokens


@pytest.mark.parametrize("text", ["-1", "many", "1.5", "9" * 30, ""])
def test_a_wrong_budget_is_refused(answered, text):
    code, _, err, _ = answered("a", "run", "smollm2-135m", "q", f"--think-budget={text}")
    assert code == ExitCode.USAGE
    assert "Traceback" not in err
    assert answered.client.generated == []


def test_an_answer_that_is_cut_short_of_its_grammar_is_a_failure(answered):
    """By a stop string too, in `run` and in a chat that answers once."""
    run, chat = ("run", "smollm2-135m", "q"), ("chat", "smollm2-135m", "-p", "q", "--no-save")
    for verb in (run, chat):
        for answer, reason, why, more in (
            ('{"a": "bXc"}', "stop", "stopped at a stop string after 0 tokens", ["--stop", "X"]),
            ('{"a": ', "length", "cut after 0 tokens", []),
        ):
            code, out, err, _ = answered(answer, *verb, "-q", "--json-schema", "json", *more, reason=reason)
            assert code == ExitCode.FAILURE, (verb, why)
            assert f"the reply: {why}; the answer does not match the JSON schema." in err
            assert out == answer.split("X")[0] + "\n"
        code, out, _, _ = answered('{"a": 1}X', *verb, "-q", "--json-schema", "json", "--stop", "X")
        assert (code, out) == (0, '{"a": 1}\n')
        # The engine saw to the grammar, of which text alone does not tell everything.
        assert answered("<|tool|>", *verb, "-q", "--grammar", "start: <|tool|>")[0] == 0


def test_the_block_of_code_is_the_text_of_json(answered):
    code, out, _, _ = answered("So:\n```py\na = 1\n```", "run", "smollm2-135m", "-x", "--json", "q")
    assert code == 0
    assert json.loads(out)["text"] == "a = 1"


def test_ctrl_c_before_there_is_code_is_an_interrupt(answered):
    def pressed():
        yield "So:"
        signal.raise_signal(signal.SIGINT)
        yield ""

    code, out, err, _ = answered(pressed(), "run", "smollm2-135m", "-x", "q", reason="cancelled")
    assert (code, out) == (ExitCode.INTERRUPTED, "")
    assert "no block" not in err


def test_a_file_for_thoughts_is_opened_first_and_what_fails_is_told(answered):
    reply = "<think>\nhmm\n</think>\n\nyes"
    code, _, err, _ = answered(reply, "run", "smollm2-135m", "--think-out", "/dev/full", "q")
    assert code == ExitCode.DISK
    assert "/dev/full: the disk is full" in err
    code, _, err, _ = answered(reply, "run", "smollm2-135m", "--think-out", "no/such", "q")
    assert (code, answered.client.loads) == (ExitCode.DISK, 0)
    assert "no/such: cannot write" in err
    code, _, err, _ = answered("a", "run", "smollm2-135m", "--think-out", "t", terminal=True)
    assert code == ExitCode.USAGE
    assert "--think-out: cannot be used without a prompt" in err


def test_a_file_for_thoughts_keeps_what_it_has_until_there_is_one(answered, tmp_path):
    """Replaced then, with its mode; nothing is at the end of a link, and no file of the model ever is."""
    notes, link = tmp_path / "notes", tmp_path / "link"
    notes.write_text("mine\n")
    notes.chmod(0o600)
    link.symlink_to(notes)
    for name, code in ("no-such-model", ExitCode.UNKNOWN_MODEL), ("smollm2-135m", 0):
        assert answered("yes", "run", name, "--think-out", "notes", "q")[0] == code
        assert notes.read_text() == "mine\n"
    assert answered("<think>\nhmm\n</think>\n\nyes", "run", "smollm2-135m", "--think-out", "notes", "q")[0] == 0
    assert ("hmm" in notes.read_text(), "mine" in notes.read_text()) == (True, False)
    assert stat.S_IMODE(notes.stat().st_mode) == 0o600
    code, _, err, _ = answered("<think>\nhmm\n</think>\n\nyes", "run", "smollm2-135m", "--think-out", "link", "q")
    assert (code, "link: this is a link to" in err) == (ExitCode.USAGE, True)
    assert {each.name for each in tmp_path.iterdir()} >= {"notes", "link"}
    assert not list(tmp_path.glob(".new-*"))


def test_thoughts_go_into_no_file_of_the_model(tmp_path):
    model = tmp_path / "snapshot"
    model.mkdir()
    blob = tmp_path / "blob"
    blob.write_bytes(b"weights")
    (model / "model.safetensors").symlink_to(blob)
    for path in (model / "model.safetensors", blob, model / "config.json"):
        with pytest.raises(LocalqError, match="is part of the model"):
            thinking_lines.check_not_of_model(path, model)
    thinking_lines.check_not_of_model(tmp_path / "thoughts", model)
    with pytest.raises(LocalqError, match="is part of the model"):
        thinking_lines.check_not_of_model(blob, blob)


def test_a_base_model_says_that_it_reads_no_system_prompt(answered, monkeypatch):
    monkeypatch.setattr(CharTokenizer, "chat_template", None)
    arguments = ("run", "smollm2-135m", "once upon")
    assert "system prompt is ignored" in answered("a", *arguments, "--system", "Be brief.")[2]
    assert "system prompt" not in answered("a", *arguments)[2]


def test_a_plan_for_a_conversation_is_that_of_its_model(capsys):
    record = Record(model="qwen3-8b")
    record.conversation.add_user("hello")
    ConversationStore().save(record)
    assert execute(["chat", "--resume", "1", "--vram", "24", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("model       qwen3-8b")
