"""The list of conversations: search, rename, delete and undo, choose, new; by keys and by mouse; with many of them."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.widgets import Button, Input, OptionList, Static

from localq.chat.history.conversation import Conversation, Message
from localq.chat.history.record import Record
from localq.chat.history.store import ConversationStore
from localq.tui.chat.session_lines import day, when
from localq.tui.chat.sessions_panel import LIMIT, SessionsPanel
from tests.support.tui.tui_layout import assert_sound
from tests.support.tui.tui_pilot import drive, screen_text, until

Script = Callable[[Pilot[Any]], Awaitable[None]]


class Host(App[Any]):
    def __init__(self, store: ConversationStore, current: int | None = None) -> None:
        super().__init__()
        self.panel, self.got = SessionsPanel(store, current), list[Any]()

    def compose(self) -> ComposeResult:
        yield self.panel

    def on_sessions_panel_chosen(self, message: SessionsPanel.Chosen) -> None:
        self.got.append(message.id)

    def on_sessions_panel_new(self, message: SessionsPanel.New) -> None:
        self.got.append("new")


def saved(store: ConversationStore, title: str, said: str = "hello", model: str = "a-model") -> int:
    session = Record(Conversation(), model, title)
    session.conversation.add(Message("user", said), None)
    store.save(session)
    assert session.id is not None
    return session.id


@pytest.fixture
def store(tmp_path) -> ConversationStore:
    store = ConversationStore(tmp_path / "sessions.db")
    saved(store, "Ships", "about the sea")
    saved(store, "Bricks", "three uses of [b]a brick[/b]", "/models/phi-4")
    saved(store, "[red]Evil\x1b[31m\ntitle\u202e[/red]", "said nothing of note")
    return store


def titles(host: Host) -> list[str]:
    return [each.title for each in host.panel._summaries]


async def listed(pilot: Pilot[Any], host: Host, *wanted: str) -> None:
    await until(pilot, lambda: titles(host) == list(wanted), f"{wanted}, not {titles(host)}")
    await pilot.pause()


ALL = ("[red]Evil\x1b[31m\ntitle\u202e[/red]", "Bricks", "Ships")


def driven(host: Host, script: Script, size: tuple[int, int] = (80, 24)) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await listed(pilot, host, *ALL)
        await script(pilot)

    drive(host, run, size=size)


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (40, 12)])
def test_titles_are_data_and_the_current_one_is_marked(store, size):
    host = Host(store, 2)

    async def script(pilot: Pilot[Any]) -> None:
        text = screen_text(host)
        assert "  [red]Evil[31m title[/red]" in text
        assert "> Bricks" in text
        assert "1 turn, phi-4" in text
        assert "now" in text
        assert_sound(host.screen)

    driven(host, script, size)


def test_choosing_by_key_and_by_mouse(store):
    host = Host(store, 2)

    async def script(pilot: Pilot[Any]) -> None:
        host.panel.query_one(OptionList).focus()
        await pilot.press("down", "enter")
        await pilot.click(OptionList, offset=(4, 1))  # below the day
        await pilot.press("n")
        await pilot.click("#new")
        await until(pilot, lambda: len(host.got) == 4)

    driven(host, script)
    assert host.got == [1, 3, "new", "new"]


def test_the_search_looks_into_what_was_said_and_escape_ends_it(store):
    host = Host(store)

    async def script(pilot: Pilot[Any]) -> None:
        host.panel.query_one(OptionList).focus()
        await pilot.press("slash", *"sea")
        await listed(pilot, host, "Ships")
        await pilot.press("enter", "enter")
        assert host.got == [1]
        await pilot.press("slash", *"nowhere")
        await listed(pilot, host)
        assert "No match" in screen_text(host)
        await pilot.press("escape")
        await listed(pilot, host, *ALL)

    driven(host, script)


def test_typing_asks_once_it_pauses(store, monkeypatch):
    host, asked, summaries = Host(store), [], store.summaries

    def counted(matching: str = "", limit: int = 1000) -> Any:
        asked.append(matching)
        return summaries(matching, limit)

    monkeypatch.setattr(store, "summaries", counted)

    async def script(pilot: Pilot[Any]) -> None:
        search = host.panel.query_one("#search", Input)
        for end in range(1, 6):
            search.value = "brick"[:end]
        await listed(pilot, host, "Bricks")

    driven(host, script)
    assert asked == ["", "brick"]


@pytest.mark.parametrize("by_mouse", [True, False])
def test_renaming_in_place(store, by_mouse):
    host = Host(store, 2)

    async def script(pilot: Pilot[Any]) -> None:
        host.panel.query_one(OptionList).focus()
        await (pilot.click("#rename") if by_mouse else pilot.press("r"))
        title = host.panel.query_one("#title", Input)
        assert (title.value, title.has_focus) == ("Bricks", True)
        await pilot.press("escape")
        assert not title.display
        assert titles(host) == [*ALL]
        await pilot.press("r", "end", *" and n\u00e4ils", "enter")
        await listed(pilot, host, ALL[0], "Bricks and n\u00e4ils", "Ships")
        assert host.panel.summary.title == "Bricks and n\u00e4ils"

    driven(host, script)
    assert store.load(2).title == "Bricks and n\u00e4ils"


@pytest.mark.parametrize("by_mouse", [True, False])
def test_what_is_deleted_comes_back(store, by_mouse):
    host = Host(store, 2)

    async def script(pilot: Pilot[Any]) -> None:
        async def do(name: str) -> None:
            button = host.panel.query_one(f"#{name}")  # one that was just clicked takes no second click
            await until(pilot, lambda: not button.has_class("-active"))
            await (pilot.click(button) if by_mouse else pilot.press(name[0]))

        host.panel.query_one(OptionList).focus()
        await do("delete")
        await listed(pilot, host, ALL[0], "Ships")
        assert "Deleted: Bricks. Undo: u" in " ".join(screen_text(host).split())
        host.panel.query_one(OptionList).highlighted = 2  # the first is the day
        await do("delete")
        await listed(pilot, host, ALL[0])
        await do("undo")
        await listed(pilot, host, ALL[0], "Ships")
        await do("undo")
        await listed(pilot, host, *ALL)
        assert host.panel.query_one("#undo").disabled
        await pilot.press("u")
        assert "Nothing to undo" in screen_text(host)

    driven(host, script)


def test_the_cursor_stays_while_others_are_saved(store):
    host = Host(store)

    async def script(pilot: Pilot[Any]) -> None:
        host.panel.query_one(OptionList).highlighted = 3
        saved(store, "Newest")
        host.panel.refresh_list(4)
        await listed(pilot, host, "Newest", *ALL)
        assert host.panel.summary.title == "Ships"
        assert "> Newest" in screen_text(host)

    driven(host, script)


def test_a_store_that_fails_is_said_and_nothing_else_happens(store):
    host = Host(store)

    async def script(pilot: Pilot[Any]) -> None:
        store.path.write_bytes(b"this is no database, but it is long enough to look like one" * 99)
        host.panel.refresh_list(None)
        await until(pilot, lambda: "sessions.db" in "".join(screen_text(host).split()))
        assert titles(host) == [*ALL]

    driven(host, script)


def test_what_another_process_has_deleted_is_said_and_leaves_the_list(store):
    host = Host(store, 2)

    async def script(pilot: Pilot[Any]) -> None:
        host.panel.query_one(OptionList).focus()
        store.delete(2)
        await pilot.press("d")
        await listed(pilot, host, ALL[0], "Ships")
        assert "no such conversation" in str(host.panel.query_one("#about", Static).content)

    driven(host, script)


def test_many_conversations_are_listed_in_part_and_the_thread_of_the_screen_is_free(tmp_path, monkeypatch):
    store = ConversationStore(tmp_path / "sessions.db")
    store.check()
    with sqlite3.connect(store.path) as db:
        now = time.time()
        db.executemany(
            "INSERT INTO sessions (id, title, model, settings, used, changed_s) VALUES (?, ?, 'm', 'null', ?, ?)",
            [(i, f"talk {i}", i, now) for i in range(1, 2001)],
        )
        db.executemany(
            "INSERT INTO turns (session, role, content, complete, created_s) VALUES (?, 'user', ?, 1, ?)",
            [(1 + i % 2000, f"words {i} " + "of a reply " * 40, now) for i in range(10_000)],
        )
    threads: set[str] = set()
    summaries = store.summaries

    def noted(matching: str = "", limit: int = 1000) -> Any:
        threads.add(threading.current_thread().name)
        return summaries(matching, limit)

    monkeypatch.setattr(store, "summaries", noted)
    host = Host(store)

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: len(titles(host)) == LIMIT)
        assert titles(host)[0] == "talk 2000"
        await pilot.pause()
        assert "search for older ones" in " ".join(screen_text(host).split())
        host.panel.query_one("#search", Input).value = "words 4321 "
        await listed(pilot, host, "talk 322")

    drive(host, script)
    assert threads == {"job conversations"}


def test_its_keys_can_be_set_and_are_told_as_they_are(store):
    host = Host(store, 2)
    host.set_keymap({"sidebar_delete": "x", "sidebar_undo": "z", "sidebar_back": "f9"})

    async def script(pilot: Pilot[Any]) -> None:
        host.panel.query_one(OptionList).focus()
        await pilot.press("d", "r")
        assert "f9: cancel".capitalize() in screen_text(host)
        await pilot.press("f9", "x")
        await listed(pilot, host, ALL[0], "Ships")
        assert "Undo: z" in " ".join(screen_text(host).split())
        await pilot.press("u", "z")
        await listed(pilot, host, *ALL)

    driven(host, script)


def test_when_in_words():
    now = time.mktime((2025, 3, 10, 12, 0, 0, 0, 0, -1))
    hour = 3600
    told = [when(now - ago, now) for ago in (5, 300, 3 * hour, 26 * hour, 10 * 24 * hour, -hour)]
    assert told == ["now", "5 min ago", "09:00", "10:00", "2025-02-28", "2025-03-10"]


def test_days_in_words():
    now = time.mktime((2025, 3, 12, 0, 30, 0, 0, 0, -1))  # a Wednesday, half past midnight
    hour = 3600
    days = [
        day(now - ago, now) for ago in (0, hour, 25 * hour, 6 * 24 * hour, 7 * 24 * hour, 40 * 24 * hour, -9 * hour)
    ]
    assert days == ["Today", "Yesterday", "Monday", "Thursday", "March 2025", "January 2025", "Today"]


def test_conversations_are_grouped_by_day_and_headings_are_passed_over(store, monkeypatch):
    day_s, now_s = 86400.0, time.time()
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE sessions SET changed_s = ? WHERE id < 3", (now_s - day_s,))
        db.execute("UPDATE sessions SET changed_s = ? WHERE id = 1", (now_s - 90 * day_s,))
    host = Host(store, 2)

    async def script(pilot: Pilot[Any]) -> None:
        rows = [row.strip() for row in screen_text(host).splitlines()]
        month = time.strftime("%B %Y", time.localtime(now_s - 90 * day_s))
        assert [row for row in rows if row in ("Today", "Yesterday", month)] == ["Today", "Yesterday", month]
        host.panel.query_one(OptionList).focus()
        await pilot.press("down")
        assert host.panel.summary.title == "Ships"
        await pilot.press("up", "up")
        assert host.panel.summary.id == 3
        await pilot.press("up")
        assert host.focused.id == "search"

    driven(host, script)


def test_without_any(tmp_path):
    host = Host(ConversationStore(Path(tmp_path / "none.db")))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "No conversations yet" in screen_text(host))
        await pilot.press("r", "d", "u")
        host.panel.query_one(OptionList).focus()
        await pilot.press("r", "d", "u", "enter")
        assert host.got == []

    drive(host, script)


def test_buttons_are_dimmed_while_they_have_nothing_to_act_on(store, tmp_path):
    def dimmed(host: Host) -> set[str]:
        return {each.id or "" for each in host.panel.query(Button) if each.disabled}

    async def empty(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "No conversations yet" in screen_text(pilot.app))
        assert dimmed(nothing) == {"rename", "delete", "undo"}

    async def script(pilot: Pilot[Any]) -> None:
        assert dimmed(host) == {"undo"}
        for left in (2, 1, 0):  # a button that was just clicked takes no second click
            await until(pilot, lambda: not host.panel.query_one("#delete").has_class("-active"))
            await pilot.click("#delete")
            await until(pilot, lambda left=left: len(titles(host)) == left)
        assert dimmed(host) == {"rename", "delete"}
        await pilot.press("u")  # the focus did not vanish with the button
        await until(pilot, lambda: len(titles(host)) == 1)
        assert dimmed(host) == set()

    nothing, host = Host(ConversationStore(tmp_path / "none.db")), Host(store)
    drive(nothing, empty)
    driven(host, script)
