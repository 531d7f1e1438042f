"""Whatever a terminal sends, reading goes on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import termios
import threading
import time
from types import SimpleNamespace

import pytest
from textual import events
from textual.drivers.linux_driver import LinuxDriver
from textual.widgets import Input, TextArea

from localq.chat.terminal.input_history import InputHistory
from localq.tui.chat.composer import Composer
from localq.tui.terminal.input_priority import is_typed
from localq.tui.terminal.terminal_input import ESCAPE_S, TICK_S, InputReader, TerminalDriver
from tests.support.tui.tui_pilot import HostApp, drive, until

PIECES = (
    *(
        b"\x1b",
        b"\x1b[",
        b"\x1bO",
        b"\x1bP",
        b"\x1b\\",
        b"\x1b[<",
        b"\x1b[I",
        b"\x1b[?2026;",
        b"200~",
        b"201~",
        b"48;",
        b"$y",
    ),
    *(b"99999", b"1114112", b"9999999999", b"27", b"\xc3", b"\xa9", b"\xff", b"\xed\xa0\x80"),
    *(bytes([letter]) for letter in b"[]<?;:9u~MRA\x07\x00\x7f-x"),
)


def keys(data: bytes) -> list[str]:
    reader = InputReader()
    found = [*reader.feed(data), *reader.tick()]
    return [message.key for message in found if isinstance(message, events.Key)]


def test_keys_are_read():
    assert keys("aé\x1b[A\r".encode()) == ["a", "é", "up", "enter"]


@pytest.mark.parametrize("broken", [b"\xff\xfe", b"\xc3\x28", b"\x1b[1114112u", b"\x1b[99999999999;1u", b"\x1b[1:u"])
def test_what_cannot_be_read_is_dropped_and_reading_goes_on(broken):
    reader = InputReader()
    list(reader.feed(broken))
    assert [getattr(message, "key", "") for message in reader.feed(b"z")] == ["z"]


# An ideographic space, no-break spaces, a thin one, Persian's ZWNJ, a ZWJ, direction marks, a soft hyphen, a combining
# mark alone, a variation selector, a letter for private use, an emoji and a code point newer than Python's tables.
LETTERS = "\u3000\u00a0\u202f\u2009\u200c\u200d\u200e\u200f\u00ad\u0301\ufe0f\ue000\U0001fae8\U0001fae9\u0378"


@pytest.mark.parametrize("letter", LETTERS, ids=ascii)
def test_all_characters_but_controls_are_text(letter):
    [message] = InputReader().feed(letter.encode())
    assert (message.character, message.is_printable) == (letter, True)
    assert is_typed(message)


@pytest.mark.parametrize("control", ["\x00", "\x01", "\x1f", "\x7f", "\x85", "\x9b", "\u2028", "\u2029"], ids=ascii)
def test_controls_and_line_separators_are_no_text(control):
    assert not any(message.is_printable for message in InputReader().feed(control.encode()))


@pytest.mark.parametrize("field", [lambda: Composer(InputHistory()), Input, TextArea])
def test_what_is_typed_is_in_the_field(field):
    text, widget = f"a{LETTERS}b \U0001f468\u200d\U0001f469 é語", field()

    async def type_text(pilot):
        widget.focus()
        for message in InputReader().feed(text.encode()):
            pilot.app.post_message(message)
        await until(pilot, lambda: (widget.value if isinstance(widget, Input) else widget.text) == text)

    drive(HostApp(widget), type_text, (60, 20), lambda message: None)


def test_letters_come_whole_however_their_bytes_arrive():
    reader = InputReader()
    pieces = [message for byte in "語".encode() for message in reader.feed(bytes([byte]))]
    assert [message.character for message in pieces] == ["語"]


@pytest.mark.parametrize(
    "text",
    ["plain\nlines", "\x1b]0;x\x07 and \x11 \r", "\x1b\x1b[", "\x1b[31mred\x1b", "\x1b[20", "\x1b[200~x", "語", ""],
)
@pytest.mark.parametrize("size", [1, 3, 7, 4096])
def test_a_paste_is_one_text_and_presses_no_key(text, size):
    reader, raw = InputReader(), b"a\x1b[200~" + text.encode() + b"\x1b[201~b"
    found = [message for place in range(0, len(raw), size) for message in reader.feed(raw[place : place + size])]
    if size > 1:  # byte by byte, the ESC of the paste is the key Esc until more comes
        assert [getattr(message, "key", None) or message.text for message in found] == ["a", text, "b"]


@pytest.mark.parametrize("press", [b"\x03", b"\x1b[99;5u"])
def test_ctrl_c_ends_a_paste_whose_end_was_lost(press):
    reader = InputReader()
    assert list(reader.feed(b"\x1b[200~half a text")) == []
    paste, key = reader.feed(press)
    assert (paste.text, key.key) == ("half a text", "ctrl+c")
    assert [message.key for message in reader.feed(b"z")] == ["z"]


def test_ctrl_c_within_a_paste_is_no_press():
    reader = InputReader()
    found = [message for part in (b"\x1b[200~one\x03", b"\x03two\x03", b"\r\x1b[201~") for message in reader.feed(part)]
    assert [message.text for message in found] == ["one\x03\x03two\x03\r"]


def test_what_only_looked_like_a_paste_is_typed_when_nothing_more_comes():
    reader = InputReader()
    assert list(reader.feed(b"\x1b[20")) == []
    reader._held_at_s -= 1
    found = [*reader.tick(), *reader.feed(b"\x1b[A")]
    assert [message.key for message in found if isinstance(message, events.Key)][-3:] == ["2", "0", "up"]


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr("localq.tui.terminal.terminal_input.time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr("textual._parser.get_time", lambda: now.s)
    return now


@pytest.mark.parametrize(("begun", "key"), [(b"\x1b", "escape"), (b"\x1b[2", "2")])
def test_the_key_esc_is_told_after_a_twentieth_of_a_second_and_looked_for_just_then(clock, begun, key):
    reader = InputReader()
    assert reader.patience_s == TICK_S
    assert list(reader.feed(begun)) == []
    found = []
    for _ in range(2 if key == "2" else 1):  # what may begin a paste waits for that, then as any sequence
        assert reader.patience_s == pytest.approx(0.05)
        clock.s += 0.049
        assert list(reader.tick()) == []
        assert reader.patience_s == pytest.approx(0.001)
        clock.s += 0.0011
        found += reader.tick()
    assert found[-1].key == key
    assert reader.patience_s == TICK_S


def test_a_sequence_that_comes_in_parts_is_one_key(clock):
    reader, found = InputReader(), []
    for part in (b"\x1b", b"[", b"1;5", b"A"):
        clock.s += 0.04
        found += [*reader.feed(part), *reader.tick()]
    assert [message.key for message in found] == ["ctrl+up"]


def test_the_users_own_patience_with_esc_counts():
    code = (
        "from localq.tui.terminal.terminal_input import InputReader; "
        "r = InputReader(); list(r.feed(b'\\x1b')); print(r.patience_s)"
    )
    environ = {**os.environ, "ESCDELAY": "5000"}
    told = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert 4.0 < float(told.stdout) <= 5.0


def test_a_paste_of_a_megabyte_comes_whole():
    text, reader = "line\n" * 200_000, InputReader()
    raw = f"\x1b[200~{text}\x1b[201~".encode()
    found = [message for place in range(0, len(raw), 4096) for message in reader.feed(raw[place : place + 4096])]
    assert [message.text for message in found] == [text]


def test_random_bytes():
    rng = random.Random(5)
    for _ in range(3000):
        keys(b"".join(rng.choices(PIECES, k=rng.randint(1, 8))))


def test_a_thread_without_time_takes_no_sequence_for_the_key_esc(monkeypatch):
    """The rest of a sequence is there when the thread goes on, 0.1 s after its ESC."""
    read_end, write_end = os.pipe()
    driver, seen = TerminalDriver.__new__(TerminalDriver), []
    driver.fileno, driver.exit_event, driver._debug = read_end, threading.Event(), False
    feed = InputReader.feed

    def feed_slowly(reader, data):
        yield from feed(reader, data)
        if data == b"\x1b":
            os.write(write_end, b"[A")
            time.sleep(2 * ESCAPE_S)

    def process(message):
        seen.append(message.key)
        driver.exit_event.set()

    monkeypatch.setattr(InputReader, "feed", feed_slowly)
    monkeypatch.setattr(driver, "process_message", process)
    os.write(write_end, b"\x1b")
    driver.run_input_thread()
    os.close(read_end)
    os.close(write_end)
    assert seen == ["up"]


def test_the_terminal_echoes_again_only_after_the_last_output(monkeypatch):
    """A Ctrl-C typed at the end was echoed within an escape sequence, while a slow terminal took the last frame."""
    driver, done = TerminalDriver.__new__(TerminalDriver), []
    driver.attrs_before, driver.fileno = [1, 2, 3], 0
    monkeypatch.setattr(LinuxDriver, "stop_application_mode", lambda driver: done.append(driver.attrs_before))
    monkeypatch.setattr(LinuxDriver, "close", lambda driver: done.append("written"))
    monkeypatch.setattr(termios, "tcsetattr", lambda place, when, attributes: done.append(attributes))
    driver.stop_application_mode()
    assert done == [None, "written", [1, 2, 3]]
    assert driver.attrs_before == [1, 2, 3]
