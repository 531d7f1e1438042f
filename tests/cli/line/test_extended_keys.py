"""Kitty's keyboard protocol in the line chat: every key is what it is without, and Shift-Enter is a new line."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import pexpect
import pytest
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

from localq.cli.line import extended_keys
from localq.cli.line.type_ahead import KeyParser
from tests.support.cli.terminal_stream import Modes, tokens

ROOT = Path(__file__).parents[3]
# As kitty writes them with progressive enhancements 1 and 4 -> as a terminal without the protocol does.
KEYS = {
    "\x1b[13;2u": "\n",  # Shift-Enter
    "\x1b[13;5u": "\n",  # Ctrl-Enter
    "\x1b[13;3u": "\x1b\r",  # Alt-Enter
    "\x1b[57414u": "\r",  # Enter of the keypad
    "\x1b[27u": "\x1b",
    "\x1b[9;2u": "\x1b[Z",
    "\x1b[127;5u": "\b",
    "\x1b[127;3u": "\x1b\x7f",
    "\x1b[99;5u": "\x03",
    "\x1b[99;133u": "\x03",  # with num lock
    "\x1b[99;69u": "\x03",  # with caps lock
    "\x1b[99:67;6u": "\x03",  # with Shift
    "\x1b[1089::99;5u": "\x03",  # on a Cyrillic keyboard
    "\x1b[100;5u": "\x04",
    "\x1b[122;5u": "\x1a",
    "\x1b[32;5u": "\0",
    "\x1b[47;5u": "\x1f",
    "\x1b[98;3u": "\x1bb",
    "\x1b[98:66;4u": "\x1bB",
    "\x1b[98;4u": "\x1bB",
    "\x1b[1080;3u": "\x1bи",
    "\x1b[104;7u": "\x1b\x08",
    "\x1b[97;9u": "",  # Super
    "\x1b[57441u": "",  # Shift alone
    "\x1b[57419u": "\x1b[A",
    "\x1b[57426u": "\x1b[3~",
    "\x1b[1;129A": "\x1b[A",
    "\x1b[1;133D": "\x1b[1;5D",
    "\x1b[1;129P": "\x1bOP",
    "\x1b[3;193~": "\x1b[3~",
    "\x1b[1;5C": "\x1b[1;5C",
    "\x1b[99999999;5u": "",
    "\x1b[55296;1u": "",
}


def read(kind: type[Vt100Parser], *pieces: str) -> list[KeyPress]:
    found: list[KeyPress] = []
    parser = kind(found.append)
    for piece in pieces:
        parser.feed(piece)
    parser.flush()
    return found


@pytest.mark.parametrize(("told", "means"), KEYS.items(), ids=[each[1:] for each in KEYS])
def test_a_key_is_what_it_is_without_the_protocol(told, means):
    assert read(KeyParser, f"a{told}", "z") == read(Vt100Parser, f"a{means}", "z")


def test_every_letter_with_ctrl_is_what_it_was():
    for letter in range(ord("a"), ord("z") + 1):
        assert read(KeyParser, f"\x1b[{letter};5u") == read(Vt100Parser, chr(letter - 96))


def test_keys_that_come_in_pieces_and_beside_others_are_read():
    typed = "".join(f"x{told}" for told in KEYS) + "\x1b[12;40Rend\x1b[A"
    whole = [key.key for key in read(KeyParser, typed)]
    assert Keys.CPRResponse in whole
    rng = random.Random(4)
    for _ in range(50):
        places = sorted(rng.sample(range(2, len(typed)), 40))
        places = [place for place in places if typed[place - 1] != "\x1b"]  # alone that is a key
        pieces = [typed[a:b] for a, b in zip([0, *places], [*places, len(typed)], strict=True)]
        assert [key.key for key in read(KeyParser, *pieces)] == whole


def test_what_is_pasted_is_no_key():
    pasted = "\x1b[99;5u and \x1b[13;2u"
    keys = read(KeyParser, f"\x1b[100;5u\x1b[200~{pasted}\x1b[201~\x1b[13;2u")
    assert [(key.key, key.data) for key in keys] == [
        (Keys.ControlD, "\x04"), (Keys.BracketedPaste, pasted), (Keys.ControlJ, "\n")
    ]  # fmt: skip


def test_nothing_that_is_typed_is_lost_or_fails():
    rng = random.Random(6)
    for _ in range(500):
        typed = "".join(rng.choices(("\x1b[", "9", "13", ";", ":", "2", "u", "~", "A", "é", "\x1b", "129"), k=12))
        assert read(KeyParser, typed) is not None


READ = """
from localq.cli.line.line_input import Reader
with Reader(False) as read:
    while True:
        print('<' + repr(read()) + '>', flush=True)
"""


@pytest.fixture
def child(tmp_path):
    script = tmp_path / "editor.sh"
    script.write_text('#!/bin/sh\necho "in the editor"; read line; printf "%s" "$line" > "$1"\n')
    script.chmod(0o755)
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "EDITOR": str(script)}
    child = pexpect.spawn(
        sys.executable, ["-c", READ], cwd=str(ROOT), env=environment, encoding="utf-8", timeout=30, dimensions=(24, 100)
    )
    child.delaybeforesend = None
    child.modes = Modes()
    child.expect_exact(">>>")
    yield child
    child.close(force=True)


def depth(child: pexpect.spawn, seen: str) -> int:
    """How deep the terminal's stack of keyboards is when this is seen."""
    child.expect_exact(seen)
    for token in tokens(child.before + child.after):
        child.modes.see(token)
    return child.modes.keyboard


def test_it_is_on_while_a_message_is_written_and_at_no_other_time(child):
    child.modes.see(next(tokens(extended_keys.on())))  # before the first prompt
    child.send("one\x1b[13;2utwo\r")
    assert depth(child, "<'one\\ntwo'>") == 0
    assert depth(child, ">>>") == 1
    child.send("\x1b[103;5u")  # Ctrl-G
    assert depth(child, "in the editor") == 0
    child.send("edited\r")
    assert depth(child, ">>> edited") == 1
    child.send("\r")
    assert depth(child, "<'edited'>") == 0
    assert depth(child, ">>>") == 1


@pytest.mark.parametrize("way", ["\x1b[100;5u", "\x04", "\x1b[99;5u", signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_it_is_off_whatever_way_the_chat_is_left(tmp_path, way):
    from tests.support.cli.terminal_faces import FACES, Place

    face = FACES["line"]()
    with face.start(Place(tmp_path)) as terminal:
        terminal.until(lambda: face.is_ready(terminal))
        assert terminal.modes.keyboard == 1
        for press in range(2 if way in ("\x1b[99;5u", signal.SIGINT) else 1):
            if press:
                terminal.until("Ctrl-C again")
                terminal.until(lambda: face.is_ready(terminal))
            if isinstance(way, str):
                terminal.send(way)
            else:
                os.kill(terminal.process.pid, way)
        terminal.wait()
        assert terminal.left_behind() == []
