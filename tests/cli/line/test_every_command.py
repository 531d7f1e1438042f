"""Every slash command of the line chat, once."""

from __future__ import annotations

import pytest

from localq.chat import commands
from localq.cli.line import clipboard
from localq.errors import LocalqError
from tests.support.chat.every_command import LEAVING, REPLIES, STEPS, put_files


def test_every_command_does_what_it_says(start, own_folder, monkeypatch):
    put_files(own_folder)
    monkeypatch.setenv("LOCALQ_VRAM", "24")
    monkeypatch.setattr(clipboard, "copied_notice", lambda text: f"code: {text}")
    monkeypatch.setattr(clipboard, "is_rich_terminal", lambda stream: True)
    talk = start(*REPLIES)
    for line, told in STEPS:
        try:
            said = "".join(talk.says(line))
        except LocalqError as error:
            said = str(error)
        if told.startswith("="):
            assert talk.session.messages[-1].content == told[1:], line
        else:
            assert told in said, line


@pytest.mark.parametrize("line", LEAVING)
def test_every_way_to_leave(start, line):
    assert start().loop.handle(line) == 0


def test_none_is_left_out():
    typed = {line.split(" ")[0] for line, _ in STEPS if line.startswith("/")}
    assert typed | set(LEAVING) == {*commands.COMMANDS, *commands.ALIASES, "/exit"}
