"""Typing a message at a terminal: several lines, paste, an editor, and what was typed before."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pexpect
import prompt_toolkit
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from localq.cli.line import line_editor
from localq.cli.line.session import SendCancelled

ROOT = Path(__file__).parents[3]
READ = """
from localq.cli.line.line_input import Reader
with Reader({}) as read:
    while True: print('<' + repr(read()) + '>')
"""


@pytest.fixture
def typing(tmp_path):
    """What starts a process that reads messages at a terminal and prints each between angle brackets."""
    children = []

    def start(remember: bool = True, **more: str) -> pexpect.spawn:
        kept = {name: value for name, value in os.environ.items() if name not in ("VISUAL", "EDITOR")}
        environment = {
            **kept, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(tmp_path), **more
        }  # fmt: skip
        children.append(
            pexpect.spawn(
                sys.executable, ["-c", READ.format(remember)], cwd=str(ROOT), env=environment, encoding="utf-8",
                timeout=30, dimensions=(24, 100),
            )
        )  # fmt: skip
        children[-1].expect(">>>")
        return children[-1]

    yield start
    for child in children:
        child.close(force=True)


def read(child: pexpect.spawn, keys: str, message: str) -> None:
    child.send(keys)
    child.expect_exact(f"<{message!r}>")
    child.expect(">>>")


def test_several_lines_paste_and_quotes(typing):
    child = typing()
    read(child, "one\x0atwo\r", "one\ntwo")  # Ctrl-J
    read(child, "one\x1b\rtwo\r", "one\ntwo")  # Alt-Enter
    read(child, "one\\\rtwo\r", "one\ntwo")
    read(child, '"""one\r\rtwo"""\r', "one\n\ntwo")
    read(child, "\x1b[200~a\nb\n\x1b[201~c\r", "a\nb\nc")
    read(child, "\x1b[200~\x1b[31mred\x1b[201~\r", "\x1b[31mred")  # as it is: the terminal shows it taken apart


def test_the_editor_gets_the_message_and_gives_it_back(typing, tmp_path):
    script = tmp_path / "editor.sh"
    script.write_text('#!/bin/sh\nprintf "%s, and edited" "$(cat "$1")" > "$1"\n')
    script.chmod(0o755)
    child = typing(EDITOR=str(script))
    child.send("typed\x07")
    child.expect_exact(", and edited")
    read(child, "\r", "typed, and edited")


def test_the_editor_gets_what_is_no_text_as_a_mark_and_failing_it_leaves_the_message(typing):
    child = typing(EDITOR="false")
    os.write(child.child_fd, b"caf\xff\x07")
    child.expect("false: failed with exit code 1")
    child.close()
    child = typing(EDITOR="sed -i s/caf/tea/")
    os.write(child.child_fd, b"caf\xff\x07")
    child.expect("tea")
    read(child, " and milk\r", "tea? and milk")


def test_up_recalls_what_an_earlier_process_was_told_unless_it_was_not_to_be_kept(typing, tmp_path):
    read(typing(), "remembered\r", "remembered")
    read(typing(remember=False), "private\r", "private")
    read(typing(), "\x1b[A\r", "remembered")
    assert "private" not in (tmp_path / "localq" / "history").read_text()


@pytest.fixture
def editor_that(monkeypatch):
    """A reader whose line editor does what it is told: a function of the real `prompt`, without its `self`."""
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        editor = line_editor.LineEditor(remember=False)
        original = prompt_toolkit.PromptSession.prompt

        def does(what):
            def prompt(session, *arguments, **more):
                return what(lambda: original(session, *arguments, **more))

            monkeypatch.setattr(prompt_toolkit.PromptSession, "prompt", prompt)

        yield (lambda: editor.read(">>> ")), does, keys


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_raises_nothing_amid_the_line_editor_and_is_answered_by_it_or_behind_it(editor_that):
    """From amid asyncio it would leave the loop half closed, and a task whose exception is printed at some time."""
    read, does, keys = editor_that

    def before(prompt):
        press()
        return prompt()

    def behind_a_line(prompt):
        press()
        return "said"

    def twice(prompt):
        press()
        raise KeyboardInterrupt  # the editor's own answer to the first

    does(before)
    with pytest.raises(KeyboardInterrupt):
        read()
    does(behind_a_line)
    with pytest.raises(SendCancelled):
        read()
    does(twice)
    with pytest.raises(KeyboardInterrupt):
        read()
    does(lambda prompt: pytest.fail("the second press was not heard"))
    with pytest.raises(KeyboardInterrupt):
        read()
    does(lambda prompt: prompt())
    keys.send_text("said\r")
    assert read() == "said"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_the_line_editor_waits_ends_it(editor_that):
    read, does, _ = editor_that

    def meanwhile(prompt):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return prompt()

    does(meanwhile)
    with pytest.raises(KeyboardInterrupt):
        read()


def test_the_keys_of_a_line_editor(typing):
    child = typing()
    for keys, message in (
        ("two\x01one \x05!\r", "one two!"),  # Ctrl-A, Ctrl-E
        ("one two\x01\x1bf\x0b\r", "one"),  # Alt-F, Ctrl-K
        ("one two\x1bb\x1bband \r", "and one two"),  # Alt-B
        ("junk\x15kept\r", "kept"),  # Ctrl-U
        ("one junk\x17two\x19\r", "one twojunk"),  # Ctrl-W, Ctrl-Y
        ("ab\x01\x04\r", "b"),  # Ctrl-D where something is written
        ("\x12woj\r\r", "one twojunk"),  # Ctrl-R looks for what was said
    ):
        read(child, keys, message)
    child.send("kept\x0c")  # Ctrl-L
    child.expect_exact("\x1b[2J")
    read(child, "\r", "kept")
    child.send("\x04")
    child.expect("EOFError")


BROKEN = """
from localq.chat.commands import completion
def fail(*given, **named):
    token = "hf_of-the-user"
    raise LookupError("no completion")
for name in [each for each in vars(completion) if each[0] != "_" and callable(getattr(completion, each))]:
    setattr(completion, name, fail)
"""


def test_a_key_that_fails_is_one_line_and_reading_goes_on(typing, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "READ", BROKEN + READ)
    child = typing()
    child.send("/s\t")
    child.expect_exact("unexpected error (LookupError)")
    child.send("\x15")  # Ctrl-U clears the line
    read(child, "still here\r", "still here")
    log = (tmp_path / "localq/errors.log").read_text()
    assert "LookupError: no completion" in log
    assert "hf_of-the-user" not in log
