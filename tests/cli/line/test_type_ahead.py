"""What is typed while a message is acted upon, and Ctrl-C where something is typed: nothing is lost, nobody leaves."""

from __future__ import annotations

import os
import sys
import termios
from pathlib import Path

import pexpect
import pytest

ROOT = Path(__file__).parents[3]
# Reads messages; each is acted upon until somebody has written into a pipe. What is read, and what is raised, is told.
READ = """
import signal, sys
from localq.cli.line.line_input import Reader
from localq.cli.line.interrupts import Interrupts
presses = Interrupts()
with presses.listen(), Reader(False, presses) as read:
    while True:
        try:
            print("<" + repr(read()) + ">", flush=True)
            with presses.raise_inside(), open(sys.argv[1]) as pipe:
                pipe.read()
        except EOFError:
            break
        except KeyboardInterrupt as error:
            print("<" + type(error).__name__ + ">", flush=True)
print("<end>")
"""


# The same behind a model that loads.
LOAD = "import sys\nprint('loading', flush=True)\nopen(sys.argv[1]).read()\n" + READ
ENVIRONMENT = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}


@pytest.fixture
def start(tmp_path):
    """What starts a script at a terminal, with the pipe."""
    children = []
    os.mkfifo(tmp_path / "pipe")

    def start(script: str, seen: str) -> pexpect.spawn:
        command = ["-c", script, str(tmp_path / "pipe")]
        child = pexpect.spawn(
            sys.executable, command, cwd=str(ROOT), env=ENVIRONMENT, encoding="utf-8", timeout=30, dimensions=(24, 100)
        )
        child.delaybeforesend = None
        children.append(child)
        child.expect_exact(seen)
        return child

    yield start
    for child in children:
        child.close(force=True)


@pytest.fixture
def child(start):
    return start(READ, ">>>")


def said(child: pexpect.spawn, keys: str, *told: str) -> None:
    child.send(keys)
    for each in told:
        child.expect_exact(f"<{each}>")


def done(tmp_path: Path) -> None:
    """What was asked for last."""
    (tmp_path / "pipe").write_text("")


def test_a_message_typed_ahead_is_sent_and_not_shown_before(child, tmp_path):
    said(child, "one\r", "'one'")
    child.send("two\rthr")
    done(tmp_path)
    child.expect_exact("<'two'>")
    assert "two" not in child.before.partition(">>>")[0]  # amid what is told of the first
    child.send("ee\r")
    done(tmp_path)
    child.expect_exact("<'three'>")


def test_a_message_typed_while_a_model_loads_is_sent(start, tmp_path):
    child = start(LOAD, "loading")
    child.send("early\r")
    child.expect_exact("early\r\n")  # the kernel's: it is there
    done(tmp_path)
    child.expect_exact("<'early'>")


def test_a_paste_that_ends_while_ctrl_c_is_pressed_has_ended(child):
    """The kernel threw its end away with all that waited, and every key was pasted from then on."""
    said(child, "one\r\x1b[200~pasted\n", "'one'")
    said(child, "more\x1b[201~\x03", "KeyboardInterrupt")
    said(child, " and typed\r", "'pasted\\nmore and typed'")


def test_ctrl_c_ends_a_paste_whose_end_was_lost(child):
    said(child, "\x1b[200~pasted\nand cut\x03", "InputDiscarded")
    said(child, "typed\r", "'typed'")


def test_ctrl_c_is_heard_behind_more_than_a_terminal_keeps(child):
    said(child, "one\r", "'one'")
    said(child, "\x1b[200~" + 2000 * "words " + "\x03", "KeyboardInterrupt")
    child.send("\x1b[201~\x15two\r")
    child.expect_exact("<'two'>")


def test_ctrl_c_right_behind_enter_takes_the_message_back(child):
    """Read together with it, it waited for the next prompt."""
    said(child, "one\r\x03", "SendCancelled")
    said(child, "two\r", "'two'")


def test_ctrl_c_where_something_was_typed_is_for_that(child):
    for keys in ("typed\x03", "\x12searched\x03", "typed\x15\x03"):
        said(child, keys, "InputDiscarded")
        child.expect_exact(">>>")  # without: a signal, and of several one
        said(child, "\x03", "KeyboardInterrupt")
        child.expect_exact(">>>")
    for first in ("first\\", '"""'):
        child.send(f"{first}\r")
        child.expect_exact("...")
        said(child, "\x03", "InputDiscarded")
        child.expect_exact(">>>")
    said(child, "typed\r", "'typed'")


def test_another_program_has_the_terminal_as_it_was_and_so_has_who_comes_next(start):
    script = (
        "import termios\nfrom localq.cli.line.line_input import Reader\nbefore = termios.tcgetattr(0)\n"
        "with Reader(False) as read:\n    read()\n    during = termios.tcgetattr(0)\n    with read.aside():\n"
        "        aside = termios.tcgetattr(0)\n    again = termios.tcgetattr(0)\n"
        "shown = [each[3] & termios.ECHO for each in (during, aside)]\n"
        "print(before == aside == termios.tcgetattr(0), during == again, shown)"
    )
    child = start(script, ">>>")
    child.send("go\r")
    child.expect_exact(f"True True [0, {termios.ECHO}]")
