"""The line of the full screen that names what a project's file decides: at every size, as long as it counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from textual.pilot import Pilot

from localq.chat.history.store import ConversationStore
from localq.chat.open_conversation import Start
from localq.sampling import Sampling
from localq.settings import Origin, Settings
from localq.tui.app import LocalqApp
from tests.support.chat.scripted_client import session_over
from tests.support.tui.tui_layout import problems
from tests.support.tui.tui_pilot import drive, say, screen_text, until

PATH = "/home/someone/clone/localq.toml"
START = Start(origins={"system": Origin("PLANTED", PATH), "top_k": Origin(3, PATH)})
LINE = "localq.toml sets system, top_k"


def app_of(start: Start = START, store: ConversationStore | None = None) -> LocalqApp:
    session = session_over(["one"], ["two"], store=store, tokenizer=None)
    session.system, session.sampling = "PLANTED", Sampling(top_k=3)
    return LocalqApp(Settings(), dataclasses.replace(start, store=store), session=session)


async def ready(app: LocalqApp, pilot: Pilot[Any]) -> None:
    await until(pilot, lambda: app.chat.is_mounted and app.chat.conversation.model is not None)


@pytest.mark.parametrize("size", [(200, 60), (110, 30), (80, 24), (60, 15), (40, 10), (34, 6)])
def test_it_is_seen_at_every_size_before_and_after_replies(size):
    app = app_of()

    async def script(pilot):
        await ready(app, pilot)
        await until(pilot, lambda: LINE[:26] in screen_text(app))
        await until(pilot, lambda: size[1] < 15 or not problems(app.screen))
        await say(pilot, "hello")
        await until(pilot, lambda: "one" in screen_text(app))
        assert LINE[: size[0] - 5] in screen_text(app)
        if size[0] >= 80:
            assert PATH in screen_text(app)

    drive(app, script, size=size)


def test_it_is_seen_before_a_model_is_open():
    app = LocalqApp(Settings(), START, choose=lambda: pytest.fail("the first frame comes first"))
    seen = []

    async def script(pilot):
        app.chat.conversation  # noqa: B018 - the parts are there
        seen.append(app.chat.query_one("#project").display)

    app._open_choice = lambda choose: None  # no model
    drive(app, script)
    assert seen == [True]


def test_it_names_what_still_counts_and_goes_with_the_last():
    app = app_of()

    async def script(pilot):
        await ready(app, pilot)
        await say(pilot, "/system mine")
        await until(pilot, lambda: "localq.toml sets top_k:" in screen_text(app))
        await say(pilot, "/set top_k 9")
        await until(pilot, lambda: "localq.toml sets" not in screen_text(app))
        assert not app.chat.query_one("#project").display
        await say(pilot, "/system PLANTED")
        await until(pilot, lambda: "localq.toml sets system:" in screen_text(app))

    drive(app, script, size=(110, 30))


def test_it_comes_with_a_conversation_that_was_begun_in_the_project(tmp_path):
    store = ConversationStore(tmp_path / "sessions.db")
    begun = app_of(store=store)

    async def first(pilot):
        await ready(begun, pilot)
        await say(pilot, "hello")

    drive(begun, first)
    session = session_over(["three"], store=store)
    app = LocalqApp(Settings(), Start(store=store), session=session)

    async def second(pilot):
        await ready(app, pilot)
        assert "localq.toml" not in screen_text(app)
        await say(pilot, "/resume 1")
        await until(pilot, lambda: LINE in screen_text(app))

    drive(app, second, size=(110, 30))


def test_without_a_project_there_is_no_line():
    app = LocalqApp(Settings(), session=session_over(["one"]))

    async def script(pilot):
        await ready(app, pilot)
        assert not app.chat.query_one("#project").display

    drive(app, script)


def test_a_path_cannot_write_to_the_terminal():
    path = "/tmp/\x1b]0;title\x07\n\u202eclone/localq.toml"
    app = app_of(Start(origins={"system": Origin("PLANTED", path)}))

    async def script(pilot):
        await ready(app, pilot)
        await until(pilot, lambda: "localq.toml sets system: /tmp/" in screen_text(app))
        assert not {"\x1b", "\x07", "\u202e"} & set(screen_text(app))

    drive(app, script, size=(110, 30))


@pytest.mark.parametrize("size", [(120, 30), (60, 15), (34, 8)])
def test_the_list_of_models_names_what_plans_are_made_with(size, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_MODELS", str(tmp_path / "none.toml"))
    app = app_of(Start(origins={name: Origin("8", PATH) for name in ("system", "kv", "head")}))

    async def script(pilot):
        await ready(app, pilot)
        await pilot.press("f3")
        await until(pilot, lambda: "localq.toml sets kv, head." in screen_text(app))

    drive(app, script, size=size)
