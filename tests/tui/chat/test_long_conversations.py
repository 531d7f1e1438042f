"""Long conversations on the screen: the newest turns are drawn, others on demand, and the end is followed."""

from __future__ import annotations

from localq.chat.history.conversation import Message
from localq.chat.history.record import Record
from localq.chat.open_conversation import Start
from localq.chat.session import ChatSession
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.chat.transcript_lines import EarlierTurns
from localq.tui.chat.transcript_view import WINDOW
from localq.tui.chat.turn_view import TurnView
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.tui.tui_pilot import drive, say, screen_text, until


def long_session(turns: int) -> Record:
    record = Record()
    for number in range(turns):
        if number % 2:
            record.conversation.add(Message("assistant", f"answer {number}"), number - 1)
        else:
            record.conversation.add(Message("user", f"question {number}"), number - 1 if number else None)
    return record


def app_with(record: Record) -> LocalqApp:
    session = ChatSession(ScriptedClient(["new"]), Load("path", LoadOptions("model")), CharTokenizer())
    return LocalqApp(Settings(), Start(record), session=session)


def test_of_ten_thousand_turns_the_newest_are_drawn_and_others_on_demand():
    record = long_session(10_000)
    app = app_with(record)

    async def script(pilot):
        await until(pilot, lambda: "answer 9999" in screen_text(app))
        assert len(app.chat.query(TurnView)) == WINDOW
        earlier, transcript = app.chat.query_one(EarlierTurns), app.chat.conversation.transcript
        assert "9950 earlier turns" in str(earlier.render())
        assert transcript.is_vertical_scroll_end
        await pilot.press("ctrl+o", "g")
        await until(pilot, lambda: len(app.chat.query(TurnView)) == 2 * WINDOW, "more at the top")
        assert "9900 earlier turns" in str(earlier.render())
        await until(pilot, lambda: transcript.scroll_y > 0, "what was seen is in its place")
        earlier.action_show()
        await until(pilot, lambda: len(app.chat.query(TurnView)) == 3 * WINDOW)
        await say(pilot, "one more")
        await until(pilot, lambda: "new" in screen_text(app), "the reply")

    drive(app, script)
    assert len(record.conversation.turns) == 10_002


def test_who_looks_back_and_goes_to_the_end_at_once_stays_there(monkeypatch):
    """The end is asked for between two frames: behind what puts back in its place what was seen."""
    app = app_with(long_session(400))

    async def script(pilot):
        await until(pilot, lambda: "answer 399" in screen_text(app))
        transcript = app.chat.conversation.transcript
        scroll_to = transcript.scroll_to

        def then_to_the_end(**how):
            scroll_to(**how)
            transcript.anchor()
            moved.append(how)

        transcript.scroll_to(y=20, animate=False, immediate=True)
        moved = []
        monkeypatch.setattr(transcript, "scroll_to", then_to_the_end)
        app.chat.query_one(EarlierTurns).action_show()
        await until(pilot, lambda: moved, "what was seen is in its place")
        await pilot.pause()
        await pilot.pause()
        assert transcript.is_vertical_scroll_end
        assert "answer 399" in screen_text(app)

    drive(app, script)
