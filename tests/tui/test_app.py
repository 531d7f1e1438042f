"""The app as a whole: its first frame, its sizes, how it is left, and what it goes on with."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from localq.chat.history.conversation import Message
from localq.chat.history.store import ConversationStore
from localq.chat.open_conversation import Start
from localq.chat.session import ChatSession
from localq.errors import ExitCode
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.tui import preload
from localq.tui.app import LocalqApp
from localq.tui.dialogs.help_screen import HelpScreen
from localq.tui.instruments.instrument_panel import InstrumentsScreen
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.chat.stored_conversations import talk
from tests.support.common import pace
from tests.support.tui.tui_layout import assert_sound
from tests.support.tui.tui_pilot import chat_app, drive, drive_chat, say, screen_text, until

ROOT = Path(__file__).parents[2]
FRAME = """
import gc, os, sys
from localq.cli import execute
from localq.cli.verbs import chat, tui
def timed(app):
    if type(app.screen).__name__ == sys.argv[1]:
        times = os.times()
        late = [each for each in ("torch", "transformers", "numpy", "localq.files.hub.fetch",
                "localq.chat.open_model", "jinja2",
                "tokenizers", "huggingface_hub", "pynvml", "pydantic", "markdown_it", "pygments",
                "localq.chat.commands",
                "localq.worker.messages", "localq.planner.speed.predict") if each in sys.modules]
        if gc.isenabled():
            late.append("a search for garbage")
        print(times.user + times.system, late, flush=True)
        os._exit(0)
def run(app):
    type(app).post_display_hook = timed
    textual.app.App.run(app, headless=True)
chat.has_screen = tui.has_screen = lambda: True
import textual.app
import localq.tui.app
localq.tui.app.LocalqApp.run = run
execute(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("screen", "arguments"),
    [("ChatScreen", ["chat"]), ("ChatScreen", ["tui"]), ("ChatScreen", ["chat", "--continue"])],
    ids=["chat", "tui", "continue"],
)
def test_the_first_frame_is_there_before_torch_and_within_600_ms(tmp_path, screen, arguments):
    ConversationStore(tmp_path / "sessions.db").save(talk(model="smollm2-135m"))
    environment = {
        **os.environ,
        "PYTHONPYCACHEPREFIX": str(tmp_path),
        "COLUMNS": "80",
        "LINES": "24",
        "LOCALQ_DATA": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def frame_s() -> float:
        done = subprocess.run(
            [sys.executable, "-c", FRAME, screen, *arguments],
            capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        seconds, _, late = done.stdout.partition(" ")
        assert late.strip() == "[]"
        return float(seconds)

    assert pace.within(0.6, frame_s)


def test_what_the_first_frame_does_without_is_imported_behind_it(monkeypatch):
    monkeypatch.setattr(preload, "MODULES", ("nturl2path",))
    for pick in (False, True):
        monkeypatch.delitem(sys.modules, "nturl2path", raising=False)
        app = LocalqApp(Settings(), Start(), pick=True) if pick else chat_app(["ok"])

        async def script(pilot):
            await until(pilot, lambda: "nturl2path" in sys.modules)

        drive(app, script)


@pytest.mark.parametrize("size", [(80, 24), (160, 50), (200, 60), (40, 12), (20, 6), (3, 3), (1, 1)])
def test_it_works_at_every_size(size, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_DATA", str(tmp_path))
    app = chat_app(["word " * 60 + "\n\n```python\n" + "x = 1  # " * 20 + "\n```\n"], ["more"], ["other"])

    async def script(pilot):
        def look():
            if size[0] >= 40:  # below, most have no room
                assert_sound(app.screen)

        await say(pilot, "hello " * 30)
        look()
        for keys in (["f2"], ["f2"], ["escape"], ["ctrl+b"], ["ctrl+b"], ["ctrl+o"], ["pageup"], ["escape"], ["f1"]):
            await pilot.press(*keys)
            await pilot.pause()
            look()
        await pilot.press("escape")
        await say(pilot, "again")
        await say(pilot, "/regen")
        assert len(app.model.session.conversation.turns) == 5
        for width, height in ((80, 24), (1, 1), size):
            await pilot.resize_terminal(width, height)
            await pilot.pause()
        shown = screen_text(app).split("\n")
        assert len(shown) == size[1]
        if size[0] >= 40:
            look()
            assert "ready" in shown[-1]
            assert app.chat.composer.region.height >= 1
            regions = [app.chat.conversation.region, app.chat.composer.region, app.chat.query_one("#status").region]
            assert not any(one.overlaps(other) for one in regions for other in regions if one is not other)

    drive_chat(app, script, size)


def test_instruments_stand_at_the_side_where_there_is_room():
    app = chat_app(["ok"])

    async def script(pilot):
        assert app.chat.instruments.display
        assert app.chat.instruments.mode == "side"
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: app.chat.instruments.mode == "strip")
        await pilot.press("f2")
        await until(pilot, lambda: isinstance(app.screen, InstrumentsScreen))
        await pilot.press("f2")
        await until(pilot, lambda: app.screen is app.chat)
        assert not app.chat.instruments.display

    drive_chat(app, script, (160, 40))


def test_the_key_that_opens_the_help_closes_it_too():
    app = chat_app([])

    async def script(pilot):
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.press("f1")
        await until(pilot, lambda: app.screen is app.chat)

    drive_chat(app, script)


def test_ctrl_q_leaves_while_a_reply_runs_and_keeps_it():
    go = threading.Event()

    def stalls():
        yield "so far"
        go.wait(30)
        yield "never"

    app = chat_app(stalls())

    async def script(pilot):
        app.chat.composer.put("go")
        await pilot.press("enter")
        await until(pilot, lambda: "so far" in screen_text(app))
        await pilot.press("ctrl+q")
        await until(pilot, app.model.session.client.cancelled.is_set)
        go.set()
        await until(pilot, lambda: app.return_value is not None)

    assert drive_chat(app, script) == ExitCode.OK
    assert app.model.session.messages[-1] == Message("assistant", "so far", complete=False)


@pytest.mark.parametrize("keys", [["escape", "escape"], ["ctrl+c", "ctrl+c"]])
def test_escape_or_ctrl_c_twice_at_an_empty_message_leaves(keys):
    app = chat_app([])

    async def script(pilot):
        await pilot.press("x", "escape", "escape")
        assert app.is_running
        await pilot.press("backspace", *keys)

    assert drive_chat(app, script) == ExitCode.OK  # nothing was interrupted


@pytest.mark.parametrize("keys", [["ctrl+d"], [*"/exit", "enter"], [*"/bye", "enter"]])
def test_other_ways_to_leave(keys):
    app = chat_app([])

    async def script(pilot):
        await pilot.press(*keys)

    assert drive_chat(app, script) == ExitCode.OK


def test_every_turn_is_saved_and_gone_on_with(tmp_path):
    store = ConversationStore(tmp_path / "sessions.db")
    session = ChatSession(ScriptedClient(["one"]), Load("path", LoadOptions("model")), CharTokenizer())
    app = LocalqApp(Settings(), Start(None, store), session=session)

    async def first(pilot):
        await until(pilot, lambda: app.chat.is_mounted and app.chat.conversation.model is not None)
        await say(pilot, "question")
        assert [turn.message.content for turn in store.find(None).conversation.turns] == ["question", "one"]

    drive(app, first)
    session = ChatSession(ScriptedClient(["two"]), Load("path", LoadOptions("model")), CharTokenizer())
    again = LocalqApp(Settings(), Start(store.find(None), store), session=session)

    async def second(pilot):
        await until(pilot, lambda: again.chat.is_mounted and again.chat.conversation.model is not None)
        assert "question" in screen_text(again)
        await say(pilot, "more")

    drive(again, second)
    assert session.client.prompts == ["<user>question<assistant>one<user>more<assistant>"]
