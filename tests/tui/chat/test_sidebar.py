"""The list of conversations beside the chat: choosing one, beginning one, coming back."""

from __future__ import annotations

import pytest
from textual.widgets import OptionList

from localq.chat.history.conversation import Message
from localq.chat.history.record import Record
from localq.chat.history.store import ConversationStore
from localq.chat.open_conversation import Start
from localq.chat.session import ChatSession
from localq.errors import LocalqError
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.chat.status_line import StatusLine
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.tui.tui_pilot import drive_chat, idle, say, screen_text, until


@pytest.fixture
def store(tmp_path):
    store = ConversationStore(tmp_path / "sessions.db")
    for title in ("about ships", "about bread"):
        record = Record(title=title)
        record.conversation.add(Message("assistant", f"all {title}"), record.conversation.add_user(f"tell {title}"))
        store.save(record)
    return store


def app_over(store: ConversationStore, *scripts: list[str]) -> LocalqApp:
    session = ChatSession(ScriptedClient(*scripts), Load("path", LoadOptions("model")), CharTokenizer())
    return LocalqApp(Settings(), Start(None, store), session=session)


@pytest.mark.parametrize("size", [(100, 30), (40, 20)])
def test_a_conversation_is_looked_for_chosen_and_gone_on_with(store, size):
    app = app_over(store, ["yes"])

    async def script(pilot):
        await pilot.press("ctrl+s")
        await until(pilot, lambda: app.chat.query("SessionsPanel #list"))
        listed = app.chat.query_one("SessionsPanel #list", OptionList)
        await until(pilot, lambda: listed.option_count == 3)
        await pilot.press(*"ships")
        await until(pilot, lambda: listed.option_count == 2)
        await pilot.press("enter", "enter")
        await until(pilot, lambda: "all about ships" in screen_text(app))
        await idle(pilot)
        assert app.chat.composer.has_focus
        assert app.chat.composer.region.width > 20
        await say(pilot, "more")
        assert store.load(1).conversation.messages()[-1].content == "yes"

    drive_chat(app, script, size)
    assert app.model.session.record.id == 1


def test_the_arrows_lead_from_the_search_to_the_list_and_back(store):
    app = app_over(store)

    async def script(pilot):
        await pilot.press("ctrl+s")
        await until(pilot, lambda: app.chat.query("SessionsPanel #list"))
        listed = app.chat.query_one("SessionsPanel #list", OptionList)
        await until(pilot, lambda: listed.option_count == 3)
        await pilot.press("down", "down")
        assert (listed.has_focus, listed.highlighted) == (True, 2)  # the first is the day
        await pilot.press("up", "up")
        assert app.focused.id == "search"

    drive_chat(app, script, (100, 30))


def test_the_line_below_tells_of_the_conversation_that_is_shown(store):
    app = app_over(store, ["answer"])

    def told() -> str:
        return str(app.chat.query_one(StatusLine).render())

    async def script(pilot):
        await say(pilot, "hi")
        assert "context" in told()
        await say(pilot, "/tokens")
        assert "context" in told()
        await say(pilot, "/resume 1")
        assert "all about ships" in screen_text(app)
        assert "context" not in told()
        await say(pilot, "/resume 3")
        assert "context" in told()
        await say(pilot, "/compact off")  # refused
        assert "context" in told()
        await say(pilot, "/clear")
        assert "context" not in told()

    drive_chat(app, script, (100, 30))


def test_a_new_one_is_begun_and_listed_when_something_was_said(store):
    app = app_over(store, ["answer"])

    async def script(pilot):
        await pilot.press("ctrl+b")
        await until(pilot, lambda: app.chat.query("SessionsPanel #list"))
        listed = app.chat.query_one("SessionsPanel #list", OptionList)
        await until(pilot, lambda: listed.option_count == 3)
        await pilot.press("escape")
        assert app.chat.composer.has_focus
        assert not app.chat.query_one("#sidebar").display
        await say(pilot, "a third thing")
        await until(pilot, lambda: listed.option_count == 4)
        await pilot.press("ctrl+n")
        await idle(pilot)
        await until(pilot, lambda: not app.chat.query("TurnView"))
        assert "new conversation" in screen_text(app)
        for is_shown in (True, False):
            await pilot.press("ctrl+b")
            assert app.chat.query_one("#sidebar").display == is_shown
        assert app.chat.composer.has_focus

    drive_chat(app, script, (100, 30))
    assert app.model.session.conversation.turns == []


@pytest.mark.parametrize("cause", ["Saving is off (--no-save, or", "Saving failed; will retry"])
def test_an_open_conversation_that_is_not_saved_is_named_with_its_cause(tmp_path, monkeypatch, cause):
    store = ConversationStore(tmp_path / "sessions.db")
    app = app_over(store, ["yes"])
    if "off" in cause:
        app.start_with = Start()
    else:

        def fail(record: Record) -> None:
            raise LocalqError("sessions.db", "disk full", "Free some space.")

        monkeypatch.setattr(store, "save", fail)

    async def script(pilot):
        await say(pilot, "hello")
        await pilot.press("ctrl+b")
        await until(pilot, lambda: "No saved conversations" in screen_text(app))
        assert "> This chat is not saved" in screen_text(app)
        assert cause in screen_text(app)
        await pilot.press("r", "d", "u", "enter")
        assert "No conversations yet" not in screen_text(app)

    drive_chat(app, script, (100, 30))


@pytest.mark.parametrize("key", ["ctrl+b", "ctrl+s", "ctrl+o"])
def test_the_keys_beside_the_prompt_tell_what_escape_does_at_rest(store, key):
    app = app_over(store, ["yes"])

    async def script(pilot):
        await say(pilot, "hello")
        await until(pilot, lambda: "Esc twice: quit" in screen_text(app))
        await pilot.press(key)
        await until(pilot, lambda: "Esc prompt" in screen_text(app))
        await pilot.press("escape")
        await until(pilot, lambda: "Esc twice: quit" in screen_text(app) and app.chat.composer.has_focus)

    drive_chat(app, script, (140, 30))
