"""A wall clock that jumps (T7): times are taken with clocks that do not; no conversation is lost or out of order."""

from __future__ import annotations

import ast
import itertools
import json
import os
import time
from pathlib import Path

import pytest
from textual.widgets import OptionList

import localq
from localq.chat.commands import COMMANDS
from localq.chat.history.conversation import Message
from localq.chat.history.export import export_record
from localq.chat.history.record import Record
from localq.chat.history.store import KEPT_S, ConversationStore
from localq.chat.open_conversation import Start
from localq.chat.reply import Reply
from localq.settings import Settings
from localq.stats import Stats
from localq.tui.app import LocalqApp
from localq.tui.chat.session_lines import day, when
from localq.wording import local_time
from tests.support.chat.scripted_client import session_over
from tests.support.tui.tui_pilot import drive_chat, say, screen_text, until

ROOT = Path(localq.__file__).parent
YEAR_S = 365 * 86400.0
WALL = {  # who may ask what time it is, and what for
    "chat/history/conversation.py": "when a turn was said",
    "chat/history/store.py": "when a conversation was used, and for how long one that was deleted is kept",
    "chat/history/snapshot_files.py": "how old a part is that nobody writes to, beside a lock that says so",
    "files/scratch.py": "how old the text of an editor is that ended without taking it; `prune` asks before it removes",
    "files/hub/errors.py": "how long a server wants to be left alone, which it says as a date; capped",
    "server/slot.py": "when a model was loaded, and when it will be unloaded, for `ps`",
    "server/user_socket.py": "when the server was started, for `ps`",
    "server/names.py": "what `/v1/models` calls created",
    "server/metrics.py": "when the server was started, as Prometheus has it",
    "server/api/chat.py": "the field `created`",
    "server/api/completions.py": "the field `created`",
    "server/api/responses.py": "the field `created_at`",
    "cli/verbs/ps.py": "how long until a model is unloaded, in words",
    "tui/chat/sessions_panel.py": "how long ago that was, in words",
    "chat/terminal/input_history.py": "a remark beside what was typed",
    "text/template_child.py": "the date that a template writes",
    "bench/conditions/conditions.py": "the date of a measurement",
}


def asks_the_wall(path: Path) -> bool:
    names = {
        f"{node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, 'id', '')}.{node.attr}"
        for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Attribute)
    }  # fmt: skip
    return bool(
        names & {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
    )


def test_nothing_is_timed_with_the_wall_clock():
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if asks_the_wall(path)}
    assert found == set(WALL)


@pytest.fixture
def jumps(monkeypatch):
    """`time.time` goes a year ahead, then back to before 1970, from call to call."""
    real, count = time.time, itertools.count()
    offsets = (0.0, YEAR_S, -60 * YEAR_S, 3600.0, -3600.0, -3 * YEAR_S)
    monkeypatch.setattr(time, "time", lambda: real() + offsets[next(count) % len(offsets)])


@pytest.fixture
def store(tmp_path) -> ConversationStore:
    return ConversationStore(tmp_path / "sessions.db")


def test_conversations_stay_whole_and_in_order(store, jumps):
    sessions = []
    for number in range(4):
        scripts = [[f"answer {number}.{turn}"] for turn in range(3)]
        session = session_over(*scripts, store=store)
        sessions.append(session)
        for turn in range(3):
            assert isinstance(list(session.ask(f"question {number}.{turn}"))[-1], Reply)
    session = sessions[1]
    session.save()  # the last used
    assert [each.id for each in store.summaries()] == [2, 4, 3, 1]
    assert store.find(None).id == 2
    kept = store.load(2).conversation
    wanted = [text.format(turn) for turn in range(3) for text in ("question 1.{}", "answer 1.{}")]
    assert [kept.turns[turn].message.content for turn in kept.path()] == wanted
    assert len({turn.created_s for turn in kept.turns}) > 3  # it did jump
    body = json.loads(export_record(store.load(2), "json"))
    assert [each["content"] for each in body["messages"]] == wanted
    assert "2  " in COMMANDS["/sessions"](session, "", None).splitlines()[0]


def test_what_was_deleted_is_kept_for_a_day_by_the_clock_and_no_jump_loses_another(store, monkeypatch):
    for number in range(3):
        record = Record(title=f"talk {number}")
        record.conversation.add_user("hello")
        store.save(record)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + YEAR_S)
    store.delete(1)
    monkeypatch.setattr(time, "time", lambda: real() - YEAR_S)  # it was wrong, and is set back
    store.check()
    store.delete(2)
    monkeypatch.setattr(time, "time", real)
    store.restore(1)
    assert [each.id for each in store.summaries()] == [3, 1]
    store.check()  # a year after it was deleted, by what the clock said
    assert store.ids() == {1, 3}
    assert KEPT_S < YEAR_S


def test_the_screen_counts_nothing_by_it(store, jumps):
    scripts = [["one ", "two"], ["three"]]
    session = session_over(*scripts)
    app = LocalqApp(Settings(), Start(None, store), session=session)

    async def script(pilot):
        await say(pilot, "first")
        await say(pilot, "second")
        assert "three" in screen_text(app)
        await pilot.press("ctrl+b")
        listed = app.chat.query_one("#sidebar OptionList", OptionList)
        await until(pilot, lambda: listed.option_count == 2)  # the heading of the day, and the conversation
        await pilot.press("ctrl+b")
        app.set_focus(app.chat.composer)
        await pilot.press("escape", "escape")  # twice within two seconds, which no jump makes longer

    assert drive_chat(app, script, (100, 30)) == 0


def test_times_that_are_none_are_question_marks(store):
    assert local_time(1e300, "%Y-%m-%d") == when(1e300, 0.0) == "????-??-??"
    assert when(float("nan"), 0.0) == "????-??-??"
    assert when(1e9 + 3600, 1e9) == local_time(1e9 + 3600, "%F")  # said ahead of now: the date, no "-60 min ago"
    assert when(1e9, 1e9 + 86400 * 1.5) == local_time(1e9, "%H:%M")  # its heading names the day
    for ago in range(0, 9 * 24 + 1):  # the date wherever the heading names no day, whatever the hour
        said, now = 1e9 - 3600 * ago, 1e9
        named = day(said, now) != local_time(said, "%B %Y")
        assert (when(said, now) == local_time(said, "%F")) == (not named)


def test_a_rate_is_never_negative():
    assert Stats("decode", generated_tokens=0, decode_s=1.0).tokens_per_s == 0.0
    assert Stats("decode", generated_tokens=5, decode_s=-1.0).tokens_per_s == 0.0
    session = session_over()
    asked = session.conversation.add_user("a")
    session.conversation.add(Message("assistant", "", False), asked, Stats("done", decode_s=1.0))
    assert "1 replies, 0 tokens, 0.0 tok/s" in COMMANDS["/stats"](session, "", None)


def test_a_model_file_of_an_odd_time_is_listed(tmp_path):
    from localq.cli.verbs.ls import _day
    from localq.files.local_models import LocalModel

    path = tmp_path / "file"
    path.write_bytes(b"")
    os.utime(path, (2**33, 2**33))
    assert _day(LocalModel("a", "bf16", path, 1, "hub", True, path.stat().st_mtime, "")) == "2242-03-16"
    assert _day(LocalModel("a", "bf16", path, 1, "hub", True, 1e20, "")) == "????-??-??"
