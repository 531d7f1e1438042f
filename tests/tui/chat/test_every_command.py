"""Every slash command of the full screen, once; and the keys of its conversation."""

from __future__ import annotations

import pytest

from localq.chat.history.store import ConversationStore
from localq.chat.session import ChatSession
from localq.chat.terminal import clipboard
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.chat.transcript_lines import Notice
from localq.tui.dialogs.help_screen import HelpScreen
from localq.worker.messages import Load
from tests.support.chat.every_command import LEAVING, REPLIES, STEPS, put_files
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.tui.tui_pilot import drive_chat, idle, say


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("DATA", "CACHE"):
        monkeypatch.setenv(f"LOCALQ_{name}", str(tmp_path / name.lower()))
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    store = ConversationStore()
    found = ChatSession(ScriptedClient(*REPLIES), Load("path", LoadOptions("tiny")), CharTokenizer(), store=store)
    found.record.model = "tiny"
    put_files(tmp_path)
    return found


def test_every_command_does_what_it_says(session, monkeypatch):
    monkeypatch.setenv("LOCALQ_VRAM", "24")
    monkeypatch.setattr(clipboard, "copied_notice", lambda text: f"code: {text}")
    app = LocalqApp(Settings(), session=session)

    async def script(pilot):
        for line, told in STEPS:
            before = len(app.chat.query(Notice))
            await say(pilot, line)
            if line in ("/help", "/?"):  # on a screen of its own
                assert isinstance(app.screen, HelpScreen), line
                await pilot.press("escape")
                continue
            if told.startswith("="):
                assert session.messages[-1].content == told[1:], line
                continue
            notices = [str(each.render()) for each in app.chat.query(Notice)]
            said = notices[before:] or notices[-1:]
            assert any(told in each for each in said), (line, notices)

    drive_chat(app, script, (120, 40))


@pytest.mark.parametrize("line", LEAVING)
def test_every_way_to_leave(session, line):
    app = LocalqApp(Settings(), session=session)
    assert drive_chat(app, lambda pilot: say(pilot, line)) == 0


def test_keys_of_the_conversation_scroll_and_go_through_versions(session):
    session.client.scripts = [["\n\n".join(f"line {number}" for number in range(80))], ["short"]]
    app = LocalqApp(Settings(), session=session)

    async def script(pilot):
        await say(pilot, "go")
        transcript = app.chat.conversation.transcript
        await pilot.press("ctrl+o")
        seen = []
        for key in ("g", "j", "j", "k", "pagedown", "pageup", "G", "home", "end"):
            await pilot.press(key)
            await pilot.pause()
            seen.append(round(transcript.scroll_y))
        last = round(transcript.max_scroll_y)
        page = seen[4] - 1
        assert seen == [0, 1, 2, 1, 1 + page, 1, last, 0, last]
        assert 5 < page < transcript.size.height + 1
        await pilot.press("r")
        await idle(pilot)
        await pilot.press("left_square_bracket")
        await idle(pilot)
        assert session.messages[-1].content.endswith("line 79")
        await pilot.press("right_square_bracket")
        await idle(pilot)
        assert session.messages[-1].content == "short"

    drive_chat(app, script)
