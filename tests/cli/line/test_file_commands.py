"""What commands of the line chat keep, find, export, copy and read: conversations, files, the clipboard."""

from __future__ import annotations

import base64
import json
import os
import re
import resource
import stat

import pytest
from rich.cells import cell_len

from localq.chat.commands.sessions import table
from localq.chat.history.record import RecordSummary
from localq.chat.history.store import ConversationStore
from localq.chat.terminal.clipboard import MOST_BYTES, copy_sequence
from localq.cli.line import clipboard
from localq.errors import LocalqError
from tests.support.cli.line_chats import Terminal


def test_a_line_of_the_list_ends_where_the_terminal_does(monkeypatch):
    long = "a title of words " * 3
    found = [
        RecordSummary(7, long, "maker/some-model", 1, 1_700_000_000.0),
        RecordSummary(12, "船" * 30, "phi", 12, 1_700_000_000.0),
        RecordSummary(3, "short", "phi", 2, 1_700_000_000.0),
    ]
    monkeypatch.setenv("COLUMNS", "80")
    first, second, third = table(found, 12).splitlines()
    assert cell_len(first) <= 80
    assert first.endswith("1 turn   some-model  a title of words a title of w…")
    assert (cell_len(second), second[:1], second[-2:]) == (79, "*", "船…")
    assert third.endswith("2 turns  phi         short")
    monkeypatch.setenv("COLUMNS", "200")
    assert table(found).splitlines()[0].endswith(long)
    monkeypatch.setenv("COLUMNS", "10")
    assert table(found).splitlines()[2].endswith("short")


def test_a_conversation_is_named_found_changed_to_and_removed(start):
    talk = start("a", "b", "c")
    assert "nothing to save" in talk.refuses("/save x")
    talk.says("about ships")
    assert talk.says("/save My \x1b[31mships")[1] == "saved as conversation 1: My [31mships\n"
    assert talk.says("/new")[1] == "new conversation\n"
    talk.says("about trees")
    listed = talk.says("/sessions")[1].splitlines()
    assert [line[:6] for line in listed] == ["*    2", "     1"]
    assert listed[1].endswith("2 turns  tiny  My [31mships")
    assert talk.says("/sessions SHIPS")[1].count("\n") == 1
    assert "no matching conversations" in talk.says("/sessions nothing")[1]
    assert talk.says("/resume ships")[1] == "My [31mships (2 messages)\n>>> about ships\na\n"
    talk.says("more")
    assert talk.client.prompts[-1] == "<user>about ships<assistant>a<user>more<assistant>"
    assert "this is the current conversation" in talk.refuses("/sessions rm 1")
    assert "deleted conversation 2" in talk.says("/sessions rm 2")[1]
    assert [each.id for each in ConversationStore().summaries()] == [1]
    talk.says("/sessions restore 2")
    assert len(ConversationStore().summaries()) == 2
    assert "no such conversation" in talk.refuses("/resume 99")


def test_what_is_not_saved_stays_off_the_disk_until_it_is_named(start, tmp_path):
    talk = start("a", "b", saved=False)
    talk.says("one")
    assert not (tmp_path / "data").exists()
    talk.says("/save kept")
    talk.says("two")
    assert len(ConversationStore().find("kept").conversation.turns) == 4


def test_export_to_a_file_or_stdout_without_a_character_that_acts(start, tmp_path):
    talk = start("```py\nprint(1)\n```")
    talk.says("/system Be \x07brief.")
    talk.says("a \x1b]0;title\x07 message")
    out, told = talk.says("/export md")
    assert out == (
        "# a \x1b]0;title\x07 message\n\nModel: tiny\n\n## System\n\nBe \x07brief.\n\n## You\n\n"
        "a \x1b]0;title\x07 message\n\n## Reply\n\n```py\nprint(1)\n```\n"
    ).replace("\x1b", "").replace("\x07", "")
    assert "FILE" in told
    talk.says("/export json notes.json")
    written = tmp_path / "notes.json"
    assert "\x1b" not in written.read_text()
    body = json.loads(written.read_text())
    assert (body["schema"], body["model"], body["system"]) == (1, "tiny", "Be \x07brief.")
    assert [message["role"] for message in body["messages"]] == ["user", "assistant"]
    assert body["messages"][1]["stats"]["prompt_tokens"] > 0
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert "the file already exists" in talk.refuses("/export json notes.json")
    (tmp_path / "link.md").symlink_to(tmp_path / "elsewhere.md")
    assert "the file already exists" in talk.refuses("/export md link.md")
    assert not (tmp_path / "elsewhere.md").exists()
    assert "No such file" in talk.refuses("/export md no/such/folder.md")
    assert "there is no user" in talk.refuses("/export md ~no-such-user")
    assert "the first argument must be `md` or `json`" in talk.refuses("/export pdf")


def test_copy_takes_what_was_written(start, monkeypatch):
    talk = start("first", "text\n```py\na = 1\n\nb = 2\n```\nmore\n~~~\nlast\n~~~")
    assert "no reply yet" in talk.refuses("/copy")
    talk.says("one")
    talk.says("two")
    assert talk.says("/copy 2") == ("first\n", "this terminal has no clipboard access; printed the text instead\n")
    assert talk.says("/copy code")[0] == "last\n"
    for number in ("3", "0", "0000012", "9" * 5000):
        assert "is not a number from 1 to 2" in talk.refuses(f"/copy {number}")
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    talk.loop.handle("/copy")
    found = re.fullmatch("\x1b]52;c;([A-Za-z0-9+/=]*)\x07", screen.getvalue())
    assert base64.b64decode(found[1]).decode() == talk.session.messages[-1].content


def test_an_export_that_fails_leaves_no_file(start, tmp_path):
    talk = start("a")
    talk.says("b")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as a full disk
    try:
        with pytest.raises(LocalqError, match="the disk is full"):
            talk.loop.handle("/export md notes.md")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "notes.md").exists()
    talk.says("/export md notes.md")
    assert "b" in (tmp_path / "notes.md").read_text()


def test_what_is_too_long_for_a_terminal_is_printed(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    text = "x" * (MOST_BYTES + 1)
    assert "too long" in clipboard.copy(text)
    assert screen.getvalue() == text + "\n"
    assert len(copy_sequence(text[1:])) <= 100_000


def test_a_file_goes_before_the_next_message(start, tmp_path):
    talk = start("a")
    (tmp_path / "notes.txt").write_bytes("\ufeffmilk\r\n\x1b[2Jeggs\n".encode())
    assert talk.says("/read notes.txt")[1] == "attached to your next message: notes.txt · 13 B · 25 tokens\n"
    talk.says("What is missing?")
    assert talk.client.prompts == ["<user>notes.txt:\n\nmilk\n[2Jeggs\n\n\nWhat is missing?<assistant>"]


def test_files_that_are_no_text_are_refused_at_once(start, tmp_path):
    talk = start()
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "large").write_bytes(b"x" * (2**20 + 1))
    os.mkfifo(tmp_path / "pipe")
    refused = {"binary": "not a text file", "latin": "not valid UTF-8", "large": "too large",
               "pipe": "not a regular file", "none": "No such file", ".": "Is a directory", "a\0b": "cannot be read",
               "": "no file given",
               "/dev/zero": "not a regular file", "~no-such-user.txt": "there is no user"}  # fmt: skip
    for name, why in refused.items():
        assert why in talk.refuses(f"/read {name}"), name
    assert talk.session.attached == []
