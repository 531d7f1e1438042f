"""A Ctrl-C that falls beside what it was meant for: before a reply begins, behind its end."""

from __future__ import annotations

import io
import signal
import sys

import pytest

from localq import cli
from localq.chat import commands
from localq.cli import command_line
from localq.cli.line import line_chat
from localq.cli.line.interrupts import Interrupts
from tests.support.cli.line_chats import Chat


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def twice() -> None:
    try:
        press()
    finally:
        press()  # amid what puts things back


def test_a_press_is_held_until_it_is_answered_and_raises_once_where_it_may():
    presses, before = Interrupts(), signal.getsignal(signal.SIGINT)
    with presses.listen():
        press()
        press()
        assert presses.take()
        assert not presses.take()
        with pytest.raises(KeyboardInterrupt), presses.raise_inside():
            twice()
        with pytest.raises(KeyboardInterrupt), presses.raise_inside():
            pytest.fail("the second press was not heard")
        with presses.raise_inside():
            pass
        press()
        assert presses.take()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def typed(start, monkeypatch):
    """A line chat at a terminal where lines are typed; its exit code and what came to stdout and stderr."""

    def typed(*lines):
        chat, rest = start("a"), iter(lines)
        monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
        monkeypatch.setattr(line_chat.Reader, "__call__", lambda _: next(rest))
        return chat, lambda: (chat.loop.run(), *chat.capsys.readouterr())

    return typed


def test_a_press_right_behind_a_reply_does_not_leave(typed, monkeypatch):
    monkeypatch.setattr(line_chat, "note_lost_characters", press)
    _, run = typed("one", "/exit")
    assert run() == (0, "a\n", "")


def test_a_press_before_a_reply_has_begun_stops_it(typed, monkeypatch):
    original = line_chat.stop_on_interrupt
    chat, run = typed("one", "/exit")
    stopped = []

    def before(session):
        press()
        return original(session)

    monkeypatch.setattr(line_chat, "stop_on_interrupt", before)
    monkeypatch.setattr(chat.session, "stop", lambda: stopped.append(True))
    assert run()[0] == 0
    assert stopped
    assert chat.loop.interrupted


def test_a_press_before_a_message_is_sent_takes_it_back(typed, monkeypatch):
    original = line_chat.LineChat.handle

    def before(chat, line):
        press()
        return original(chat, line)

    monkeypatch.setattr(line_chat.LineChat, "handle", before)
    chat, run = typed("one", "/tokens", "/exit")
    assert run() == (0, "", "(stopped)\n(stopped)\n")
    assert chat.client.prompts == []


def test_a_press_during_a_command_of_a_pipe_ends_the_program(capsys, monkeypatch):
    """With --plain a pipe gives commands; without a terminal Ctrl-C ends the program at any point."""
    chat = Chat(capsys, ("a",), None, scripted=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/tokens\n/exit\n"))
    monkeypatch.setitem(commands.COMMANDS, "/tokens", lambda *_: press())
    with pytest.raises(KeyboardInterrupt):
        chat.loop.run()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("amid", ["execute", "note_lost_characters", "signal"])
def test_a_press_while_the_program_ends_changes_its_code_alone(monkeypatch, amid):
    """It ended by the signal, with a traceback, where it had kept the code until then."""
    pressed = []

    def within(original):
        def once(*arguments):
            if not pressed and (amid != "signal" or arguments == (signal.SIGINT, signal.SIG_IGN)):
                pressed.append(True)
                press()
            return original(*arguments)

        return once

    for name in ("unraisablehook", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(command_line.stream_encoding, "prepare", lambda *_: None)
    monkeypatch.setattr(command_line, "execute", lambda _: 130)
    if amid == "signal":
        monkeypatch.setattr(cli.signal, "signal", within(signal.signal))
    else:
        monkeypatch.setattr(command_line, amid, within(getattr(command_line, amid)))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert pressed
    assert ended.value.code == 130
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
