"""Keys as they are set, told and refused; themes; a screen without colour."""

from __future__ import annotations

import pytest
from textual.theme import BUILTIN_THEMES

from localq import keymap, settings, settings_file
from localq.chat.history.store import ConversationStore
from localq.chat.open_conversation import Start
from localq.chat.session import ChatSession
from localq.errors import ExitCode, LocalqError
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.dialogs.help_screen import HelpScreen
from localq.tui.instruments.instrument_panel import InstrumentsScreen
from localq.tui.key_line import KeyLine
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.tui.tui_pilot import chat_app, drive_chat, idle, say, screen_text, until


def test_help_shows_every_key_as_it_is_set_and_every_command():
    app = chat_app([], keys={"send": "ctrl+x"})

    async def script(pilot):
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.pause()
        text = screen_text(app)
        for name in keymap.KEYS:
            assert name in text
        assert "Ctrl-X" in text
        assert "/regen" in text
        await pilot.press("escape")
        assert app.screen is app.chat

    drive_chat(app, script, (140, 160))


def test_keys_can_be_set():
    app = chat_app(["ok"], keys={"send": "ctrl+x", "newline": "enter"})

    async def script(pilot):
        await pilot.press("a", "enter", "b", "ctrl+x")
        await pilot.pause()
        await idle(pilot)

    drive_chat(app, script)
    assert app.model.session.messages[0].content == "a\nb"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"sned": "ctrl+x"}, "Did you mean send"),
        ({"send": ""}, "is not a list of keys"),
        ({"send": 3}, "is not a list of keys"),
        ({"send": "ctrl+q"}, "already bound to quit"),
        ({"edit": "r"}, "already bound to edit|already bound to regenerate"),
        ({"picker_pul": "x"}, "Did you mean picker_pull"),
        ({"picker_pull": "d"}, "already bound to picker_delete|already bound to picker_pull"),
        ({"help": "f6"}, "already bound to help"),  # which acts over every screen
        ({"sidebar_new": "ctrl+o"}, "already bound to jump"),
        ({"page_up": "r"}, "already bound to regenerate|already bound to page_up"),
        ({"instruments_leave": "f5"}, "already bound to profile"),
        ({"question_no": "y"}, "already bound to question_yes"),
    ],
)
def test_keys_that_mean_nothing_are_refused(keys, named):
    with pytest.raises(LocalqError, match=named) as caught:
        Settings(keys=keys)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    "keys",
    [
        {"new": "f6"},  # of the settings, which have unknown action
        {"stop": "escape,f9"},
        {"sidebar_back": "escape,f9"},
        {"picker_pull": "r", "settings_apply": "ctrl+n", "opening_again": "y"},
        {"details_leave": "n", "instruments_leave": "ctrl+c"},
    ],
)
def test_what_is_on_another_screen_is_no_clash(keys):
    assert Settings(keys=keys).keys == keys


def test_keys_are_read_from_the_file_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text('[keys]\nsend = "ctrl+x, f9"\n')
    assert settings.load({}).keys == {"send": "ctrl+x,f9"}
    assert settings.load({"LOCALQ_KEYS": "copy=f8; new=f7,f6"}).keys == {"copy": "f8", "new": "f7,f6"}


def test_keys_are_written_as_a_table_and_others_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    settings_file.write("keys", "send=ctrl+x; newline=enter")
    settings_file.write("theme", "nord")
    assert (settings.load({}).keys, settings.load({}).theme) == ({"send": "ctrl+x", "newline": "enter"}, "nord")
    with pytest.raises(LocalqError, match="Did you mean send"):
        settings_file.write("keys", "sned=ctrl+x")
    settings_file.write("keys", None)
    assert settings.load({}).keys == {}


def test_the_themes_are_those_of_textual():
    assert set(settings.CHOICES["theme"]) == set(BUILTIN_THEMES)


@pytest.mark.parametrize("theme", ["textual-light", "ansi-dark"])
def test_a_theme_is_taken(theme):
    app = chat_app(["ok"], theme=theme)

    async def script(pilot):
        assert app.theme == theme
        await say(pilot, "hi")

    drive_chat(app, script)


async def choose_nord(app, pilot):
    app.action_change_theme()
    await until(pilot, lambda: type(app.screen).__name__ == "ThemePalette")
    await pilot.press(*"nord")
    await until(pilot, lambda: "nord" in screen_text(app).split("\n", 4)[-1], "the theme")
    await pilot.press("enter")
    await until(pilot, lambda: app.theme == "nord")


def test_a_theme_chosen_in_the_palette_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text("# mine\nseed = 3\n")
    app = chat_app([])

    async def script(pilot):
        await choose_nord(app, pilot)
        assert app.settings.theme == "nord"

    drive_chat(app, script)
    assert settings.load({}) == Settings(theme="nord", seed=3)
    assert "# mine" in (tmp_path / "config.toml").read_text()


def test_a_theme_that_cannot_be_kept_is_taken_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text("this is no = = toml")
    app = chat_app([])

    async def script(pilot):
        await choose_nord(app, pilot)
        await until(pilot, lambda: any("cannot be read" in each.message for each in app._notifications))

    drive_chat(app, script)
    assert (tmp_path / "config.toml").read_text() == "this is no = = toml"


def test_without_colour_none_is_drawn_and_all_can_be_told_apart(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    app = chat_app(["```py\nx = 1\n```"], [LocalqError("engine", "gone", "Again.")])

    async def script(pilot):
        await say(pilot, "hi")
        await say(pilot, "and")
        assert "✗ engine: gone. Again." in screen_text(app)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: "▶ " in screen_text(app), "the mark of the focus")
        written = app.screen._compositor.render_update(full=True).render_segments(app.console)
        assert "38;" not in written
        assert "48;" not in written

    drive_chat(app, script)


def click_place(line: KeyLine, label: str) -> tuple[int, int]:
    return 1 + line.render().plain.index(label), 0  # 1: its padding


@pytest.mark.parametrize("is_beside", [False, True], ids=["focus in the list", "focus in the prompt"])
def test_a_click_on_each_key_of_the_list_of_conversations_does_what_the_key_does(is_beside, tmp_path):
    session = ChatSession(ScriptedClient(), Load("path", LoadOptions("model")), CharTokenizer())
    app = LocalqApp(Settings(), Start(None, ConversationStore(tmp_path / "sessions.db")), session=session)

    async def script(pilot):
        await pilot.press("ctrl+b")
        await until(pilot, lambda: app.chat.query("SessionsPanel KeyLine"))
        await pilot.pause()
        line = app.chat.query_one("SessionsPanel KeyLine", KeyLine)
        for label, holds in (
            ("/ search", lambda: app.focused.id == "search"),
            ("Down list", lambda: app.focused.id == "list"),
            ("Esc close", lambda: not app.chat.query_one("#sidebar").display),
        ):
            if is_beside:
                app.set_focus(app.chat.composer)
            assert await pilot.click(line, offset=click_place(line, label))
            await until(pilot, holds, label)
        assert app.chat.composer.has_focus
        assert app.return_value is None

    drive_chat(app, script, (120, 30))


def test_a_click_on_each_key_of_the_instruments_does_what_the_key_does(monkeypatch):
    timed = []
    monkeypatch.setattr(InstrumentsScreen, "action_profile", lambda self: timed.append(self))
    app = chat_app([])

    async def script(pilot):
        await pilot.press("f2", "f2")
        await until(pilot, lambda: isinstance(app.screen, InstrumentsScreen))
        await pilot.pause()
        line = app.screen.query_one(KeyLine)
        await pilot.click(line, offset=click_place(line, "F5"))
        await until(pilot, lambda: timed)
        await pilot.click(line, offset=click_place(line, "F1"))
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, InstrumentsScreen))
        await pilot.click(line, offset=click_place(line, "Esc"))
        await until(pilot, lambda: app.screen is app.chat)

    drive_chat(app, script)


def test_a_click_sends_the_key_that_was_set():
    app = chat_app([], keys={"instruments_leave": "ctrl+w"})

    async def script(pilot):
        await pilot.press("f2", "f2")
        await until(pilot, lambda: isinstance(app.screen, InstrumentsScreen))
        await pilot.pause()
        line = app.screen.query_one(KeyLine)
        await pilot.click(line, offset=click_place(line, "Ctrl-W"))
        await until(pilot, lambda: app.screen is app.chat)

    drive_chat(app, script)
