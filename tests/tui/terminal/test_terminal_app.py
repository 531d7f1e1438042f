"""What happens between two frames: a focus before there is anything, a list without room, what is hidden meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from textual import events
from textual.command import CommandPalette
from textual.geometry import Size
from textual.widgets import OptionList

from localq.tui.chat.turn_view import DrawnTurn, TurnView
from localq.tui.dialogs.settings_screen import SettingsScreen
from tests.support.tui.tui_pilot import HostApp, chat_app, drive, drive_chat, screen_text, until


@pytest.mark.parametrize("action", ["page_down", "page_up"])
def test_a_list_of_no_height_is_paged_to_no_end(action):
    app = chat_app([])

    async def script(pilot):
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(app.screen, CommandPalette))
        found = app.screen.query_one(OptionList)
        await until(pilot, lambda: found.option_count > 0)
        found._index_to_line.clear()  # as `OptionList._update_lines` leaves it where there is no width
        found.highlighted = None
        found.set_reactive(OptionList.highlighted, 1)
        await app.run_action(f"command_list('{action}')", app.screen)
        assert app.is_running

    drive_chat(app, script)


def test_another_error_of_a_key_is_no_list_of_no_height(monkeypatch):
    app = chat_app([])

    async def script(pilot):
        monkeypatch.setattr(app, "action_palette", lambda: {}["nothing"])
        with pytest.raises(KeyError):
            await app.run_action("palette", app)

    drive_chat(app, script)


def test_a_turn_may_have_the_focus_before_it_is_drawn():
    class Early(TurnView):
        def compose(self):
            self.on_focus()
            yield from super().compose()

    view = Early(DrawnTurn(1, "assistant", "text"))
    app = HostApp(view)

    async def script(pilot):
        await until(pilot, lambda: "▶ Reply" in screen_text(app))
        view.on_blur()
        await until(pilot, lambda: "▶" not in screen_text(app))

    drive(app, script)


def test_what_was_hidden_for_a_moment_does_not_keep_the_mouse():
    """Textual's `Input` holds it from a press on; hidden before the release, every click was nobody's."""
    app = chat_app([])

    async def script(pilot):
        await pilot.press("ctrl+b")
        await until(pilot, lambda: bool(app.screen.query("#search")))
        await pilot.mouse_down("#search")
        await until(pilot, lambda: app.mouse_captured is not None)
        app.screen.remove_class("sidebar")
        await until(pilot, lambda: app.screen.query_one("#search").region.area == 0)
        x, y = app.chat.composer.region.center
        for kind in (events.MouseDown, events.MouseUp):  # the pilot's go past the app
            app.post_message(kind(None, int(x), int(y), 0, 0, 1, False, False, False))
        await until(pilot, lambda: app.focused is app.chat.composer)
        assert app.mouse_captured is None

    drive_chat(app, script)


@pytest.mark.parametrize("by", ["key", "paste", "size"])
def test_what_had_the_focus_before_it_was_hidden_has_it_again(by):
    app = chat_app([])

    async def script(pilot):
        await until(pilot, lambda: app.focused is app.chat.composer)
        app.screen.set_focus(None)  # as a size of one row leaves it
        if by == "size":
            await pilot.resize_terminal(70, 20)
            await until(pilot, lambda: app.focused is app.chat.composer)
        elif by == "paste":
            app.post_message(events.Paste("some text"))
            await until(pilot, lambda: app.chat.composer.text == "some text")
        else:
            await pilot.press("a", "enter")
            await until(pilot, lambda: "▌ a" in screen_text(app))

    drive_chat(app, script)


def test_a_screen_ends_once_and_waits_for_what_lies_above():
    app = chat_app([])

    async def script(pilot):
        await pilot.press("f1")
        await until(pilot, lambda: app.screen is not app.chat)
        below = app.screen
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(app.screen, CommandPalette))
        above = app.screen
        below.dismiss(None)
        assert app.screen is above
        for _ in range(2):
            above.dismiss(None)
        await until(pilot, lambda: app.screen is app.chat)
        await pilot.press("ctrl+p")  # the one before may not be gone altogether
        await until(pilot, lambda: isinstance(app.screen, CommandPalette))

    drive_chat(app, script)


@pytest.mark.parametrize(("place", "left"), [((300, 200), False), ((40, 23), True)], ids=["gone", "there"])
def test_a_click_at_what_the_screen_no_longer_has_leaves_the_palette(place, left):
    """It was pressed before the terminal became smaller."""
    app = chat_app([])

    async def script(pilot):
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(app.screen, CommandPalette))
        app.screen.post_message(events.Click(app.screen, *place, 0, 0, 1, False, False, False))
        await pilot.pause()
        assert (app.screen is app.chat) == left

    drive_chat(app, script)


def test_a_screen_that_is_left_before_it_is_there_is_left():
    app = chat_app([])

    async def script(pilot):
        screen = SettingsScreen(None, app.settings)
        app.push_screen(screen)
        screen.dismiss(None)
        await until(pilot, lambda: screen not in app.screen_stack)
        assert app.screen is app.chat

    drive_chat(app, script)


@pytest.mark.parametrize("in_worker", [False, True])
def test_what_is_asked_for_while_the_app_ends_is_no_error(in_worker):
    app = chat_app([])

    async def script(pilot):
        async def look():
            app.exit(0)
            app.chat.query_one("#nothing")

        if in_worker:
            app.run_worker(look)
        else:
            app.exit(0)
            app.push_screen(SettingsScreen(None, app.settings))

    drive_chat(app, script)
    assert app.return_code == 0


@pytest.mark.parametrize("key", ["", "f1", "ctrl+p"])
def test_sizes_that_wait_for_each_other_come_to_an_end(key):
    """Two events of different sizes in the queue of a screen: each was answered by one more like it, without end."""
    app, seen = chat_app([]), []

    def hook(message):
        if isinstance(message, events.Resize):
            seen.append(message.size)

    async def script(pilot):
        await until(pilot, lambda: app.chat.is_mounted)
        if key:
            await pilot.press(key)
            await until(pilot, lambda: app.screen is not app.chat)
        screen = app.screen
        small = Size(30, 10)
        with app.batch_update():  # as a reply that streams has it; each layout leaves a message then
            for size in (small, app.size, small, app.size):
                screen.post_message(events.Resize(size, size))
                screen.call_later(lambda: None)  # events of sizes that follow each other are one
            before = -1
            async with asyncio.timeout(20):
                while len(seen) > before:
                    before = len(seen)
                    await pilot.pause(0.3)
        assert screen.size == app.size

    drive(app, script, hook=hook)
