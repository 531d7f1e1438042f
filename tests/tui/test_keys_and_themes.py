"""Keys as they are set, told and refused; themes; a screen without colour."""

from __future__ import annotations

import pytest
from textual.theme import BUILTIN_THEMES

from localq import keymap, settings, settings_file
from localq.errors import ExitCode, LocalqError
from localq.settings import Settings
from localq.tui.dialogs.help_screen import HelpScreen
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
        await until(pilot, lambda: any("cannot read it" in each.message for each in app._notifications))

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
