"""Whatever a terminal sends, reading goes on."""

from __future__ import annotations

import random

import pytest
from textual import events

from localq.tui.terminal_input import Keys

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
    reader = Keys()
    found = [*reader.feed(data), *reader.tick()]
    return [message.key for message in found if isinstance(message, events.Key)]


def test_keys_are_read():
    assert keys("aé\x1b[A\r".encode()) == ["a", "é", "up", "enter"]


@pytest.mark.parametrize("broken", [b"\xff\xfe", b"\xc3\x28", b"\x1b[1114112u", b"\x1b[99999999999;1u", b"\x1b[1:u"])
def test_what_cannot_be_read_is_dropped_and_reading_goes_on(broken):
    reader = Keys()
    list(reader.feed(broken))
    assert [getattr(message, "key", "") for message in reader.feed(b"z")] == ["z"]


def test_letters_come_whole_however_their_bytes_arrive():
    reader = Keys()
    pieces = [message for byte in "語".encode() for message in reader.feed(bytes([byte]))]
    assert [message.character for message in pieces] == ["語"]


def test_random_bytes():
    rng = random.Random(5)
    for _ in range(3000):
        keys(b"".join(rng.choices(PIECES, k=rng.randint(1, 8))))
