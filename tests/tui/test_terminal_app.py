"""What happens between two frames: a focus before there is anything, a list without room."""

from __future__ import annotations

import pytest
from textual.command import CommandPalette
from textual.widgets import OptionList
from tui_pilot import HostApp, chat_app, drive, drive_chat, screen_text, until

from localq.tui.turn_view import Turn, TurnView


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

    view = Early(Turn(1, "assistant", "text"))
    app = HostApp(view)

    async def script(pilot):
        await until(pilot, lambda: "▶ Reply" in screen_text(app))
        view.on_blur()
        await until(pilot, lambda: "▶" not in screen_text(app))

    drive(app, script)
