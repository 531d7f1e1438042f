"""Going on with another model: from the picker, by a command, and when that fails."""

from __future__ import annotations

import contextlib
import threading

import pytest

from localq.chat.commands.models import SwitchModel
from localq.chat.open_model import OpenSession
from localq.chat.open_options import Opening, OpenOptions
from localq.chat.session import ChatSession
from localq.errors import ExitCode, LocalqError
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.chat.session_job import SwitchRequested
from localq.tui.jobs import model_jobs
from localq.tui.jobs.model_handle import ModelHandle
from localq.tui.models.opening_screen import OpeningScreen
from localq.tui.models.picker import PickedModel, PickerScreen
from localq.worker.messages import Load, Loading
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.tui.tui_pilot import chat_app, drive, drive_chat, idle, say, screen_text, until

TOO_LARGE = LocalqError("big", "it does not fit", "Take a small one.", ExitCode.DOES_NOT_FIT)


class Client(ScriptedClient):
    """Can be closed, as engine clients can."""

    closed = False
    wanted = OpenOptions()  # what it was opened with

    def close(self) -> None:
        self.closed = True
        self.die()


@pytest.fixture
def opened(monkeypatch):
    """What is opened as which model: sessions over scripted clients; names that begin with "big" fail."""
    sessions: dict[str, ChatSession] = {}

    @contextlib.contextmanager
    def open_session(name, settings, watcher, wanted):
        if name.startswith("big"):
            raise TOO_LARGE
        watcher.say(f"opening {name} as {wanted.format}")
        watcher.loading(Loading("loading weights", 1, 2))
        client = Client([f"{name} says"], [f"{name} again"])
        client.wanted = wanted
        session = ChatSession(client, Load("path", LoadOptions(name)), CharTokenizer())
        session.system, session.record.model, session.draft = settings.system, name, settings.draft
        sessions[name] = session
        yield OpenSession(session, client)
        client.close()

    monkeypatch.setattr(model_jobs.open_model, "open_session", open_session)
    return sessions


def test_the_model_of_the_command_line_is_opened_behind_the_first_frame(opened):
    app = LocalqApp(Settings(model="one", system="Be brief."))

    async def script(pilot):
        await pilot.press(*"hello", "enter")
        await until(pilot, lambda: "one says" in screen_text(app), "what was sent before is answered")
        await idle(pilot)
        assert "opening one as None" in screen_text(app)
        await pilot.press("ctrl+q")

    assert drive(app, script) == ExitCode.OK
    app.close()
    assert opened["one"].client.prompts == ["<system>Be brief.<user>hello<assistant>"]
    assert opened["one"].client.closed


def test_what_cannot_be_opened_is_said_and_another_can_be_chosen(opened):
    app = LocalqApp(Settings(model="big"))

    async def script(pilot):
        await until(pilot, lambda: "✗ big: it does not fit. Take a small one." in screen_text(app))
        assert "no model" in screen_text(app)
        assert app.error is TOO_LARGE
        app._switch_to("small", None)
        await until(pilot, lambda: app.chat.conversation.model is not None)
        await say(pilot, "hello")
        assert "small says" in screen_text(app)
        assert app.error is None

    drive(app, script)


def test_a_draft_model_is_opened_beside_the_model(opened):
    app = LocalqApp(Settings(model="one"))

    async def script(pilot):
        await until(pilot, lambda: app.chat.is_mounted and app.chat.conversation.model is not None)
        first = opened["one"]
        app.chat.conversation.start(lambda: SwitchModel("one", draft="small-1b"))  # as `/set draft small-1b` does
        await until(pilot, lambda: opened["one"] is not first and app.model.session is opened["one"])
        await until(pilot, lambda: app.screen is app.chat and app.chat.conversation.model is app.model)
        assert first.client.closed
        assert opened["one"].draft == "small-1b"

    drive(app, script)


def test_the_conversation_goes_on_with_another_model(opened):
    app = LocalqApp(Settings(model="one"))

    async def script(pilot):
        await until(pilot, lambda: app.chat.is_mounted and app.chat.conversation.model is not None)
        await say(pilot, "hello")
        view = app.chat.conversation
        view.start(lambda: SwitchModel("two", "nf4"))  # as `/model two nf4` does
        await until(pilot, lambda: "two" in opened and app.model.session is opened["two"])
        await until(pilot, lambda: app.screen is app.chat and app.chat.conversation.model is app.model)
        assert opened["one"].client.closed
        await say(pilot, "and now")
        assert "two says" in screen_text(app)

    drive(app, script)
    assert opened["two"].client.prompts == ["<user>hello<assistant>one says<user>and now<assistant>"]


def test_where_another_cannot_be_opened_the_first_goes_on(opened):
    app = LocalqApp(Settings(model="one"))

    async def script(pilot):
        await until(pilot, lambda: app.chat.is_mounted and app.chat.conversation.model is not None)
        await say(pilot, "hello")
        app._switch_to("big", None)
        await until(pilot, lambda: isinstance(app.screen, OpeningScreen) and app.screen.error is not None)
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.chat and app.chat.conversation.model is not None)
        await say(pilot, "still there?")
        assert "one again" in screen_text(app)
        assert "✗ big: it does not fit" in screen_text(app)

    drive(app, script, (80, 40))
    assert opened["one"].client.loads == 2


def test_without_a_model_one_is_picked_first(opened):
    app = LocalqApp(Settings(), pick=True)

    async def script(pilot):
        await until(pilot, lambda: isinstance(app.screen, PickerScreen))
        app.screen.dismiss(PickedModel("one", "nf4", force=True))
        await until(pilot, lambda: app.chat.query("ConversationView") and app.chat.conversation.model is not None)
        await say(pilot, "hello")
        assert "one says" in screen_text(app)

    drive(app, script)
    assert opened["one"].client.wanted == OpenOptions("nf4", force=True)


def test_keys_before_there_is_a_list_to_pick_from_do_nothing(opened, monkeypatch):
    monkeypatch.setattr(LocalqApp, "_pick_model", lambda self: None)
    app = LocalqApp(Settings(), pick=True)

    async def script(pilot):
        await until(pilot, lambda: app.screen is app.chat)
        await pilot.press(
            "escape", "ctrl+b", "ctrl+s", "ctrl+n", "ctrl+t", "ctrl+y", "ctrl+o", "f2", "f5", "pageup", "x"
        )
        await pilot.resize_terminal(130, 40)
        await pilot.press("enter", "ctrl+q")
        await until(pilot, lambda: app.return_value is not None)

    assert drive(app, script) == ExitCode.OK


def test_picking_nothing_leaves(opened):
    app = LocalqApp(Settings(), pick=True)

    async def script(pilot):
        await until(pilot, lambda: isinstance(app.screen, PickerScreen))
        app.screen.dismiss(None)
        await until(pilot, lambda: app.return_value is not None)

    assert drive(app, script) == ExitCode.OK


def test_f3_and_f4_open_their_screens_once():
    app = chat_app([])

    async def script(pilot):
        for key, name in (("f3", "PickerScreen"), ("f4", "SettingsScreen")):
            await pilot.press(key)
            await until(pilot, lambda name=name: type(app.screen).__name__ == name)
            await pilot.press("f3", "f4")
            await pilot.pause()
            assert len(app.screen_stack) == 3
            app.screen.dismiss(None)
            await until(pilot, lambda: app.screen is app.chat)

    drive_chat(app, script)


def test_a_key_while_the_old_model_closes_breaks_nothing_off(opened):
    closing, go = threading.Event(), threading.Event()

    class Slow(Client):
        def close(self):
            closing.set()
            assert go.wait(30)
            super().close()

    app = chat_app([])
    app.model = ModelHandle(app.model.session, lambda: None, Slow().close, dict)

    async def script(pilot):
        app.on_switch_requested(SwitchRequested(SwitchModel("one")))
        await until(pilot, closing.is_set)
        await pilot.press("f3")
        await pilot.pause()
        assert not isinstance(app.screen, PickerScreen)
        go.set()
        await until(pilot, lambda: app.model.session.record.model == "one", "the other model")
        await until(pilot, lambda: app.screen is app.chat)
        await say(pilot, "hello")
        assert "one says" in screen_text(app)
        await pilot.press("f3")
        await until(pilot, lambda: isinstance(app.screen, PickerScreen))

    drive_chat(app, script)
    app.close()


@pytest.mark.parametrize("way", ["back", "picks", "waits"])
def test_the_list_of_models_while_one_is_chosen(opened, way):
    """Esc goes back to the choice; a model that is picked goes first; a list that is open stays."""
    go = threading.Event()

    def choose():
        assert go.wait(30)
        return Opening(Settings(model="chosen"), OpenOptions())

    app = LocalqApp(Settings(), choose=choose, pick=True)

    async def script(pilot):
        await until(pilot, lambda: "choosing a model" in screen_text(app))
        await pilot.press("f3")
        await until(pilot, lambda: isinstance(app.screen, PickerScreen))
        if way == "back":
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is app.chat)
            await pilot.pause()
            assert app.return_value is None
            go.set()
            await until(pilot, lambda: app.model is not None)
        elif way == "picks":
            app.screen.dismiss(PickedModel("one", None))
            await until(pilot, lambda: app.model is not None and app.screen is app.chat)
            go.set()
            await until(pilot, lambda: not app._choosing)
        else:
            go.set()
            await until(pilot, lambda: not app._choosing)
            await pilot.pause()
            assert isinstance(app.screen, PickerScreen)
            app.screen.dismiss(PickedModel("one", None))
            await until(pilot, lambda: app.model is not None and app.screen is app.chat)
        await pilot.pause()
        assert list(opened) == (["chosen"] if way == "back" else ["one"])
        assert "ready" in screen_text(app).splitlines()[-1]

    drive(app, script)
    app.close()
