"""The palette: whatever can be done on a screen is found by its name, and done."""

from __future__ import annotations

from typing import Any

import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot

from localq import keymap
from localq.chat import commands
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.dialogs import palette_lines
from localq.tui.dialogs.help_screen import HelpScreen
from localq.tui.keys import first_key
from localq.tui.models import picker_plans, picker_rows
from tests.support.tui.tui_pilot import chat_app, drive, drive_chat, idle, say, screen_text, until
from tests.tools.golden_screens import OUTLOOK, ROWS


async def looked_up(pilot: Pilot[Any], words: str, line: str) -> None:
    await pilot.press("ctrl+p")
    await until(pilot, lambda: isinstance(pilot.app.screen, CommandPalette))
    await pilot.press(*words)
    await until(pilot, lambda: line in screen_text(pilot.app), line)


async def looked_for(pilot: Pilot[Any], words: str, line: str) -> None:
    await looked_up(pilot, words, line)
    await pilot.press("enter")


@pytest.mark.parametrize(
    ("words", "line"),
    [("keys and commands", "Help: keys and commands"), ("help", "Help: keys and commands")],
)
def test_it_finds_what_can_be_done_by_its_name(words, line):
    app = chat_app([])

    async def script(pilot):
        await looked_for(pilot, words, line)
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))

    drive_chat(app, script)


def test_every_key_that_acts_anywhere_and_every_command_is_listed_once():
    app = chat_app([])

    async def script(pilot):
        found = palette_lines.entries(app, app.chat)
        titles = [each.title for each in found]
        assert len({*titles}) == len(titles)
        for name, key in keymap.KEYS.items():
            if key.where == keymap.ANYWHERE and name not in ("palette", "stop"):
                assert [each.key for each in found].count(first_key(key)) == 1, name
        for name in commands.COMMANDS:
            assert len([each for each in found if name in each.usage.replace(",", "").split()]) == 1, name
        both = {each.usage.split()[0]: each.key for each in found if each.usage and each.key}
        assert both.items() >= {"/help": "F1", "/new": "Ctrl-N", "/copy": "Ctrl-Y", "/exit": "Ctrl-Q"}.items()
        assert any("thinking" in each.lower() for each in titles)

    drive_chat(app, script)


def test_a_command_is_done_or_begun_where_more_words_may_follow():
    app = chat_app(["one"], ["two"])

    async def script(pilot):
        await say(pilot, "hi")
        await looked_for(pilot, "/regen", "/regen")
        await until(pilot, lambda: "two" in screen_text(app))
        await idle(pilot)
        app.chat.composer.put("draft")
        await looked_for(pilot, "write the conversation to FILE", "/export md|json")
        await until(pilot, lambda: app.chat.composer.text == "/export draft")
        assert app.focused is app.chat.composer

    drive_chat(app, script)


@pytest.mark.parametrize(("words", "line"), [("FILE, or", "/export md|json [FILE]"), ("lark", "json [SCHEMA|@FILE]")])
def test_what_stands_in_brackets_is_shown(words, line):
    app = chat_app([])

    async def script(pilot):
        await looked_up(pilot, words, line)

    drive_chat(app, script)


@pytest.mark.parametrize("width", [30, 60, 110])
def test_an_entry_is_one_line_with_its_command_and_its_key_at_the_right(width):
    line = palette_lines.PaletteEntry("Begin a new conversation", "/new", "Ctrl-N", lambda: None).line(width)
    assert line.cell_length == width
    assert line.plain.endswith("   Ctrl-N")
    assert line.plain.startswith("Begin a")
    assert ("/new" in line.plain) == (width > 30)


def test_on_another_screen_it_lists_what_can_be_done_there(monkeypatch, own_cache, no_own_models):
    monkeypatch.setattr(picker_rows, "name_rows", lambda: ROWS)
    monkeypatch.setattr(picker_plans, "outlook", lambda settings, say: OUTLOOK)
    monkeypatch.setattr(picker_plans, "plan_rows", lambda *given: ROWS)
    app = LocalqApp(Settings(), pick=True)

    async def script(pilot):
        await until(pilot, lambda: "23,000 MiB" in screen_text(app))
        titles = [each.title for each in app.get_system_commands(app.screen)]
        assert not any(each.startswith("/") or "conversation" in each for each in titles)
        assert not any(each.startswith(("Another model", "Settings")) for each in titles)  # not from here
        await looked_for(pilot, "sort order", "Change the sort order")
        await until(pilot, lambda: "By name." in screen_text(app))

    drive(app, script)


def test_what_needs_a_model_says_so_before_there_is_one(monkeypatch, own_cache, no_own_models):
    monkeypatch.setattr(LocalqApp, "open", lambda self, name, wanted: None)
    app = LocalqApp(Settings())

    async def script(pilot):
        await until(pilot, lambda: app.screen is app.chat and app.focused is app.chat.composer)
        await pilot.press("ctrl+n")
        await until(pilot, lambda: any("not loaded yet" in each.message for each in app._notifications))

    drive(app, script)
