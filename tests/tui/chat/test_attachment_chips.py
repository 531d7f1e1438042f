"""Attachments in the full screen: chips with name, size and tokens that unfold, and never the title."""

from __future__ import annotations

from pathlib import Path

import pytest

from localq.tui.chat.attachment_chips import MOST_CHARACTERS, AttachmentChip
from localq.tui.chat.turn_view import TurnView
from tests.support.tui.tui_pilot import chat_app, drive_chat, say, screen_text


@pytest.fixture
def own_folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_attached_file_is_a_chip_that_unfolds(own_folder):
    (own_folder / "notes.txt").write_text("milk\n\x1b[31mbread")
    app = chat_app(["fine"])

    async def script(pilot):
        await say(pilot, "What is missing in @notes.txt?")
        text = screen_text(app)
        assert "▶ notes.txt · 14 B" in text
        assert "milk" not in text
        assert "attached" not in text
        assert "What is missing in @notes.txt?" in text
        (chip,) = app.chat.query(AttachmentChip)
        chip.children[0].focus()
        await pilot.press("enter")
        await pilot.pause()
        text = screen_text(app)
        assert "▼ notes.txt · 14 B" in text
        assert "milk" in text
        assert "\x1b" not in text
        await pilot.click(chip.children[0])
        await pilot.pause()
        assert "milk" not in screen_text(app)

    drive_chat(app, script)
    record = app.model.session.record
    assert record.name() == "What is missing in @notes.txt?"
    assert app.model.session.client.prompts[0].startswith("<user>notes.txt:\n\nmilk")


def test_copy_and_edit_take_the_words_and_an_edit_keeps_the_file(own_folder):
    (own_folder / "notes.txt").write_text("milk")
    app = chat_app(["fine"], ["again"])

    async def script(pilot):
        await say(pilot, "Look at @notes.txt")
        view = app.chat.query(TurnView).first()
        assert view.turn.text == "Look at @notes.txt"
        await say(pilot, "/edit Look once more")
        assert len(app.chat.query(AttachmentChip)) == 1

    drive_chat(app, script)
    assert app.model.session.client.prompts[1] == "<user>notes.txt:\n\nmilk\n\nLook once more<assistant>"


def test_a_file_that_cannot_be_attached_is_named(own_folder):
    (own_folder / "data.bin").write_bytes(b"\0")
    app = chat_app(["fine"])

    async def script(pilot):
        await say(pilot, "See @data.bin")
        assert "could not attach @data.bin: not a text file" in screen_text(app)

    drive_chat(app, script)


def test_a_large_file_is_drawn_in_part(own_folder):
    (own_folder / "big.txt").write_text("x" * (MOST_CHARACTERS + 500))
    app = chat_app(["fine"])

    async def script(pilot):
        await say(pilot, "@big.txt")
        (chip,) = app.chat.query(AttachmentChip)
        chip.toggle()
        await pilot.pause()
        assert "more characters not shown" in str(chip.query_one(".attached").render())

    drive_chat(app, script)
