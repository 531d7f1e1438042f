"""Writing a message: what keys do, what is pasted, what was typed before, and what completes a word."""

from __future__ import annotations

import asyncio
import os

from textual import events

from localq.chat import commands
from localq.chat.commands import completion
from localq.chat.terminal.input_history import InputHistory
from localq.tui.chat.completions import Completions
from localq.tui.chat.composer import LONGEST, Composer
from tests.support.tui.tui_pilot import HostApp, chat_app, drive, drive_chat, idle, screen_text, until


def alone(script, *typed: str, size=(60, 20)):
    """`script(pilot, composer, sent)` with a composer of its own; `sent` collects messages."""
    past = InputHistory()
    for each in typed:
        past.add(each)
    composer, sent, seen = Composer(past), [], []

    def hook(message):
        if isinstance(message, Composer.Sent) and message not in seen:
            seen.append(message)
            sent.append(message.text)

    async def run(pilot):
        composer.focus()
        await pilot.pause()
        await script(pilot, composer, sent)

    drive(HostApp(composer), run, size, hook)


def test_a_line_that_is_too_long_to_be_counted_at_every_key_is_not_broken_into_rows():
    async def script(pilot, composer, sent):
        for text, breaks in (("word " * 100, True), ("word " * (LONGEST // 5), False)):
            pilot.app.post_message(events.Paste(text))
            await until(pilot, lambda text=text: composer.text.endswith(text))
            assert composer.soft_wrap is breaks
        await pilot.press("enter")
        assert [len(each) for each in sent] == [500 + LONGEST]
        assert composer.soft_wrap
        composer.put("x" * (LONGEST + 1))
        assert not composer.soft_wrap
        await pilot.press("backspace")
        await until(pilot, lambda: composer.soft_wrap)

    alone(script)


def test_a_backslash_and_triple_quotes_make_one_message_of_lines_as_in_the_line_chat():
    code = '"""What it is."""\nx = """a\nb"""'

    async def script(pilot, composer, sent):
        await pilot.press(*"one", "backslash", "enter", *"two", "enter")
        await pilot.press(*["quotation_mark"] * 3, "enter", *"a", "enter", "b", *["quotation_mark"] * 3, "enter")
        await pilot.press(*"c", "backslash", "left", "enter")  # the cursor is not behind it
        pilot.app.post_message(events.Paste(code))
        await until(pilot, lambda: composer.text == code)
        await pilot.press("enter", *["quotation_mark"] * 6, "enter")
        assert sent == ["one\ntwo", "a\nb", "c\\", code]
        assert composer.text == '"' * 6

    alone(script)


def test_enter_sends_and_three_keys_break_the_line():
    async def script(pilot, composer, sent):
        await pilot.press("a", "shift+enter", "b", "ctrl+j", "c", "alt+enter", "d", "enter")
        await until(pilot, lambda: sent == ["a\nb\nc\nd"])
        assert composer.text == ""

    alone(script)


def test_what_is_typed_behind_a_message_is_neither_part_of_it_nor_lost():
    """Whoever takes messages may be behind the keys."""

    async def script(pilot, composer, sent):
        await pilot.press("a", "enter", "enter", "b", "c")
        await until(pilot, lambda: sent == ["a"])
        assert composer.text == "bc"
        composer.give_back("a ")
        assert composer.text == "a bc"
        await pilot.press("d", "enter")
        await until(pilot, lambda: sent == ["a", "a bcd"])

    alone(script)


def test_keys_that_edit_come_between_the_letters_however_far_the_screen_is_behind():
    async def script(pilot, composer, sent):
        app = pilot.app

        async def behind():  # of the screen's messages nothing is taken meanwhile
            for key, letter in (("x", "x"), ("backspace", None), ("a", "a"), ("enter", "\r"), ("b", "b")):
                app.post_message(events.Key(key, letter))
            async with asyncio.timeout(10):
                while composer.text != "b":
                    await asyncio.sleep(0.01)

        composer.screen.call_next(behind)
        await until(pilot, lambda: sent == ["a"])
        assert composer.text == "b"

    alone(script)


def test_ctrl_c_is_of_the_composer_only_where_something_is_selected():
    async def script(pilot, composer, sent):
        heard = []
        pilot.app.action_help_quit = lambda: heard.append("ctrl+c")
        await pilot.press("a", "ctrl+c")
        await until(pilot, lambda: heard == ["ctrl+c"])
        await pilot.press("shift+left", "ctrl+c")
        await until(pilot, lambda: pilot.app.clipboard == "a")
        assert heard == ["ctrl+c"]

    alone(script)


def test_nothing_is_not_sent():
    async def script(pilot, composer, sent):
        await pilot.press("space", "enter", "enter")
        await pilot.pause()
        assert sent == []
        assert composer.text == " "

    alone(script)


def test_a_paste_of_a_megabyte_arrives_whole_and_harmless():
    text = "x" * 80 + "\r\n\x1b[31m"

    async def script(pilot, composer, sent):
        pilot.app.post_message(events.Paste(text * 12_000))
        await until(pilot, lambda: composer.text)
        assert composer.text == ("x" * 80 + "\n[31m") * 12_000
        await pilot.press("enter")
        await until(pilot, lambda: sent)
        assert len(sent[0]) == 85 * 12_000

    alone(script)


def test_history_at_the_edges_only():
    async def script(pilot, composer, sent):
        await pilot.press("d", "up")
        assert composer.text == "second\nline"
        await pilot.press("up")
        assert composer.text == "second\nline"  # the cursor went to its first line
        await pilot.press("up")
        assert composer.text == "first"
        await pilot.press("down", "down", "down")
        assert composer.text == "d"

    alone(script, "first", "second\nline")


def test_it_grows_with_its_text_and_no_further_than_ten_lines():
    app = chat_app(["ok"])

    async def script(pilot):
        assert app.chat.composer.content_size.height == 1
        app.chat.composer.put("\n".join("abcd"))
        await pilot.pause()
        assert app.chat.composer.content_size.height == 4
        app.chat.composer.put("\n".join("x" * 50))
        await pilot.pause()
        assert app.chat.composer.content_size.height == 10

    drive_chat(app, script, (80, 40))


def test_commands_are_completed_with_what_they_do():
    app = chat_app([])

    async def script(pilot):
        await pilot.press(*"/to")
        await until(pilot, lambda: app.chat.query_one(Completions).display)
        assert "how full the context is" in screen_text(app)
        await pilot.press("enter")
        assert app.chat.composer.text == "/tokens "
        assert not app.chat.query_one(Completions).display
        await pilot.press("enter")
        await pilot.pause()
        await idle(pilot)
        assert "the conversation is empty" in screen_text(app)

    drive_chat(app, script)


def test_the_list_is_moved_in_and_closed_by_keys_and_taken_by_a_click():
    app = chat_app([])

    async def script(pilot):
        found = [name for name, _ in completion.command_completions("/s")]
        await pilot.press(*"/s", "down", "tab")
        assert app.chat.composer.text == f"{found[1]} "
        app.chat.composer.put("")
        await pilot.press(*"/s")
        await until(pilot, lambda: "Enter choose  Esc close the list" in screen_text(app))
        await pilot.press("escape")
        assert not app.chat.query_one(Completions).display
        await until(pilot, lambda: "Enter send" in screen_text(app))
        assert app.chat.composer.text == "/s"
        await pilot.press("a")
        await until(pilot, lambda: app.chat.query_one(Completions).display)
        await pilot.click(Completions, offset=(2, 0))
        await until(pilot, lambda: app.chat.composer.text == "/save ")

    drive_chat(app, script)


def test_every_command_is_offered_with_its_help():
    offered = completion.command_help()
    assert set(commands.COMMANDS) | set(commands.ALIASES) | {"/exit"} == set(offered)
    assert [name for name, what in offered.items() if not what] == []


def test_names_of_files_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").touch()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "deep.txt").touch()
    (tmp_path / ".hidden").touch()
    (tmp_path / "bad\x1b[2Jname").touch()
    os.mkfifo(tmp_path / "npipe")
    assert completion.file_completions("@not") == [("@notes.md", "file"), ("@nothing/", "folder")]
    assert completion.file_completions("@nothing/d") == [("@nothing/deep.txt", "file")]
    assert completion.file_completions("@notes.md") == []  # Enter sends it
    assert completion.file_completions("@nothing/deep.txt") == []
    assert completion.file_completions("@.h") == [("@.hidden", "file")]
    assert completion.file_completions("@bad") == []
    assert completion.file_completions("@no/such/x") == []
    assert completion.file_completions("@\0") == []
    app = chat_app([])

    async def script(pilot):
        await pilot.press(*"see @not")
        await until(pilot, lambda: app.chat.query_one(Completions).display)
        await pilot.press("tab")
        await until(pilot, lambda: app.chat.composer.text == "see @notes.md ")

    drive_chat(app, script)


def test_the_editor_gives_the_message_back(monkeypatch):
    app = chat_app([])
    monkeypatch.setattr(app, "edit_text", lambda text, otherwise: text + " longer")

    async def script(pilot):
        await pilot.press("h", "i", "ctrl+g")
        await until(pilot, lambda: app.chat.composer.text == "hi longer")

    drive_chat(app, script)


def test_without_a_terminal_to_edit_at_the_message_stays():
    app = chat_app([])

    async def script(pilot):
        await pilot.press("h", "i", "ctrl+g")
        await until(pilot, lambda: "cannot open an editor without a terminal" in screen_text(app))
        assert app.chat.composer.text == "hi"

    drive_chat(app, script)
