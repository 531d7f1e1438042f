"""Conversations that outlive their process: a real model, kills and signals in the middle of a reply."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pexpect
import pytest

from localq.chat.history.conversation import Message
from localq.chat.history.record import ChatSettings, Record
from localq.chat.history.store import ConversationStore
from localq.sampling import Sampling
from tests.support.cli.cli_processes import LOCALQ, ROOT, environment_of, localq, localq_typed
from tests.support.files.real_model import smollm2

LONG = "Tell a very long story about the sea.\n"


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """A small context, as in test_run_and_chat.py."""
    return {**environment_of(tmp_path, smollm2()), "LOCALQ_CTX": "1024"}


@pytest.fixture
def store(environment) -> ConversationStore:
    return ConversationStore(Path(environment["LOCALQ_DATA"]) / "sessions.db")


def stopped_in_a_reply(environment: dict[str, str], number: signal.Signals) -> int:
    """The exit status of a chat that gets this signal when the first letter of its reply is there."""
    with subprocess.Popen(
        [*LOCALQ, "chat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        env=environment,
    ) as process:  # fmt: skip
        process.stdin.write(LONG.encode())
        process.stdin.close()
        assert process.stdout.read(1)
        process.send_signal(number)
        code = process.wait(timeout=30)
        assert b"Traceback" not in process.stderr.read()
    return code


def test_after_kill_9_the_question_is_there_and_can_be_answered(environment, store):
    earlier = Record(model=environment["LOCALQ_MODEL"], settings=ChatSettings(Sampling(), max_tokens=8))
    earlier.conversation.system = "You are Ada."
    earlier.conversation.add(Message("assistant", "Ada"), earlier.conversation.add_user("What is your name?"))
    store.save(earlier)
    assert stopped_in_a_reply(environment, signal.SIGKILL) == -signal.SIGKILL
    conversation = store.find(None).conversation
    assert [turn.message.content for turn in conversation.turns] == [LONG.strip()]
    again = localq_typed(environment, "chat", "--continue", "-n", "8", lines="/regen\n/sessions\n")
    assert again.returncode == 0, again.stderr
    assert "the last message has no reply; /regen generates one" in again.stderr
    assert len(store.find(None).conversation.messages()) == 2
    assert again.stderr.count(" turns ") == 2
    other = localq_typed(environment, "chat", "--resume", "your name", lines="/system\n/set max_tokens\n")
    assert "system prompt: You are Ada." in other.stderr
    assert "max_tokens = 8" in other.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 143), (signal.SIGINT, 0)])
def test_a_signal_keeps_what_came_of_the_reply(environment, store, number, code):
    assert stopped_in_a_reply(environment, number) == code
    (question, reply) = store.find(None).conversation.messages()
    assert question.content == LONG.strip()
    assert reply.content
    assert not reply.complete


def test_run_ends_at_a_stop_string_and_saves_nothing(environment, store):
    done = localq(environment, "run", environment["LOCALQ_MODEL"], "Capital of France?", "--stop", "Paris", "-q")
    assert done.returncode == 0, done.stderr
    assert "capital" in done.stdout
    assert "Paris" not in done.stdout
    assert not store.path.exists()


def test_a_file_that_cannot_be_used_ends_before_the_model_is_touched(environment, store):
    store.path.parent.mkdir(parents=True)
    store.path.write_bytes(b"\0" * 5000)
    for arguments in (["chat"], ["chat", "--continue"], ["chat", "org/not-here", "--offline"]):
        done = localq(environment, *arguments, stdin="hi\n")
        assert done.returncode == 8, done.stderr
        assert done.stderr.count("\n") == 1
        assert "--no-save" in done.stderr
    done = localq(environment, "chat", "--no-save", "-n", "2", "-q", stdin="hi\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert store.path.read_bytes() == b"\0" * 5000


def test_what_there_is_to_go_on_with_is_checked_first(environment, store):
    for arguments in (["--continue"], ["--resume"], ["--resume", "7"], ["--continue", "--resume", "7"], ["--stop="]):
        done = localq(environment, "chat", *arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert done.stderr.count("\n") == 1
    session = Record(model="smolm2-135m")
    session.conversation.add(Message("assistant", "a"), session.conversation.add_user("q"))
    store.save(session)
    assert localq(environment, "chat", "--continue").returncode == 4  # of a model that is gone


def test_at_a_terminal_it_asks_shows_how_it_ended_and_copies(environment, store):
    for title in ("ships", "trees"):
        session = Record(model=environment["LOCALQ_MODEL"])
        asked = session.conversation.add_user(title)
        session.conversation.add(Message("assistant", f"reply \x1b]0;on {title}\x07"), asked)
        store.save(session)
    plain = {**environment, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    child = pexpect.spawn(
        LOCALQ[0], [*LOCALQ[1:], "chat", "--plain", "--resume"], cwd=str(ROOT), env=plain, encoding="utf-8", timeout=60,
        dimensions=(40, 120),
    )  # fmt: skip
    child.expect("ships")
    child.expect("Resume which conversation[?] ")
    child.sendline("1")
    child.expect(r"ships \(2 messages\)")
    child.expect(r"reply \]0;on ships\r")  # the sequence in it is taken apart
    child.expect(">>>")
    child.send("/copy\r")
    child.expect("\x1b]52;c;[A-Za-z0-9+/=]+\x07")
    child.expect("copied")
    child.expect(">>>")
    child.sendeof()
    child.expect("Saved as conversation 1")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
