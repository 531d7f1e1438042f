"""A conversation on the screen, over a scripted engine: what is drawn, kept, stopped, and said when something fails."""

from __future__ import annotations

import asyncio
import threading

import pytest
from textual.widget import Widget

from localq.chat.session import ChatSession
from localq.errors import LocalqError
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.chat.transcript_lines import Notice
from localq.tui.chat.turn_view import TurnView
from localq.tui.reply.reply_text import CodeBlock, ReplyText
from localq.worker.messages import Load
from tests.support.chat.scripted_client import DEAD, CharTokenizer, ScriptedClient
from tests.support.tui.tui_pilot import chat_app, drive_chat, idle, say, screen_text, until


def session_of(app) -> ChatSession:
    return app.model.session


def views(app) -> list[TurnView]:
    return list(app.chat.query(TurnView))


def notices(app) -> str:
    return "\n".join(str(each.render()) for each in app.chat.query(Notice))


def test_a_turn_streams_and_is_drawn_and_kept():
    app = chat_app(["Hel", "lo **you**"])

    async def script(pilot):
        await say(pilot, "Hi there")
        text = screen_text(app)
        assert "Hi there" in text
        assert "Hello you" in text
        assert [view.turn.number for view in views(app)] == [0, 1]
        assert "context" in text
        assert app.chat.composer.text == ""

    drive_chat(app, script)
    assert session_of(app).client.prompts == ["<user>Hi there<assistant>"]


def test_what_streamed_is_what_is_drawn_at_the_end():
    text = (
        "# T\n\n- a\n- b\n\n```py\nx = [1]\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n1. one\n2. two\n\n> quoted **b**"
    )
    app = chat_app(list(text), [text])

    async def script(pilot):
        await say(pilot, "slowly")
        await say(pilot, "at once")
        slow, quick = (view.query_one(ReplyText) for view in views(app) if view.turn.role == "assistant")
        assert slow.source == quick.source == text
        shapes = [[type(each).__name__ for each in view.query("*")] for view in (slow, quick)]
        assert shapes[0] == shapes[1]

    drive_chat(app, script)


def test_a_stalled_reply_is_stopped_and_kept_and_marked():
    go = threading.Event()

    def stalls():
        yield "so far"
        go.wait(30)
        yield "never read"

    app = chat_app(stalls(), ["better"])

    async def script(pilot):
        app.chat.composer.put("go")
        await pilot.press("enter")
        await until(pilot, lambda: "so far" in screen_text(app), "what came is drawn while more is waited for")
        await pilot.press("escape")
        await until(pilot, lambda: "stopping" in screen_text(app), "the screen says at once that it stops")
        go.set()
        await idle(pilot)
        assert session_of(app).messages[-1].content == "so far"
        assert "cut" in screen_text(app)
        assert app.chat.composer.has_focus
        await say(pilot, "again")
        assert "better" in screen_text(app)

    drive_chat(app, script)


def test_ctrl_c_stops_as_escape_does():
    go = threading.Event()

    def stalls():
        yield "a"
        go.wait(30)
        yield "b"

    app = chat_app(stalls())

    async def script(pilot):
        app.chat.composer.put("go")
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.conversation.busy and "model · answering" in screen_text(app))
        await pilot.press("ctrl+c")
        go.set()
        await idle(pilot)
        assert session_of(app).messages[-1].complete is False

    drive_chat(app, script)


def test_a_dead_engine_is_told_and_the_next_message_starts_another():
    app = chat_app(["par", DEAD], ["better"])

    async def script(pilot):
        await say(pilot, "first")
        died = "✗ engine process: stopped unexpectedly (signal SIGKILL). The next message starts a new one."
        assert died in notices(app)
        assert "par" in screen_text(app)
        assert "cut" in screen_text(app)
        await say(pilot, "second")
        assert "better" in screen_text(app)

    drive_chat(app, script)
    assert session_of(app).client.loads == 2


def test_a_failure_before_the_first_word_leaves_the_question():
    app = chat_app([DEAD], ["now"])

    async def script(pilot):
        await say(pilot, "question")
        assert "question" in screen_text(app)
        assert len(views(app)) == 1
        await say(pilot, "/regen")
        assert "now" in screen_text(app)
        assert [view.turn.number for view in views(app)] == [0, 1]

    drive_chat(app, script)


def test_regenerate_edit_and_versions_from_the_keyboard():
    app = chat_app(["first"], ["second"], ["edited answer"])

    async def script(pilot):
        await say(pilot, "question")
        await pilot.press("ctrl+o", "r")
        await idle(pilot)
        text = screen_text(app)
        assert "second" in text
        assert "first" not in text
        assert "2 of 2" in text
        await pilot.press("left_square_bracket")
        await idle(pilot)
        assert "first" in screen_text(app)
        assert "1 of 2" in screen_text(app)
        await pilot.press("e")
        assert app.chat.composer.text == "question"
        app.chat.composer.put("another question")
        await pilot.press("enter")
        await idle(pilot)
        text = screen_text(app)
        assert "another question" in text
        assert "edited answer" in text
        assert "You · 2 of 2" in text
        await pilot.press("ctrl+o", "up", "left_square_bracket")
        await idle(pilot)
        assert "You · 1 of 2" in screen_text(app)

    drive_chat(app, script, (80, 40))
    assert len(session_of(app).conversation.turns) == 5


def test_escape_gives_up_an_edit():
    app = chat_app(["first"], ["second"])

    async def script(pilot):
        await say(pilot, "question")
        await pilot.press("ctrl+o", "e", "escape")
        assert app.chat.composer.text == ""
        await say(pilot, "another")

    drive_chat(app, script)
    assert [turn.parent for turn in session_of(app).conversation.turns] == [None, 0, 1, 2]


def test_thought_is_folded_and_ctrl_t_shows_it():
    app = chat_app(["<think>\nhm, hm", " hm\n</think>\n\n", "The answer"])

    async def script(pilot):
        await say(pilot, "think")
        text = screen_text(app)
        assert "The answer" in text
        assert "thought (3 words)" in text
        assert "hm, hm" not in text
        await pilot.press("ctrl+t")
        await until(pilot, lambda: "hm, hm hm" in screen_text(app), "the thought")
        assert "<think>" not in screen_text(app)
        await pilot.press("ctrl+t")
        await until(pilot, lambda: "hm, hm hm" not in screen_text(app), "the fold")

    drive_chat(app, script)


def test_code_is_copied_as_it_was_written():
    code = "def f(x):\n\treturn [bold]x[/]  \n"
    app = chat_app([f"Look:\n\n```python\n{code}```\n"])

    async def script(pilot):
        await say(pilot, "code")
        app.chat.query_one(CodeBlock).focus()
        await pilot.press("y")
        await until(pilot, lambda: app.clipboard == code.removesuffix("\n"), "the code on the clipboard")
        app.copy_to_clipboard("")
        await pilot.click("CopyMark")
        await until(pilot, lambda: app.clipboard == code.removesuffix("\n"), "the code on the clipboard")
        await pilot.press("escape", "ctrl+y")
        await idle(pilot)
        assert app.clipboard == f"Look:\n\n```python\n{code}```\n"

    drive_chat(app, script, (80, 30))


HOSTILE = "[bold]b[/] [/] [@click=app.exit]x[/] \\[x] \x1b]52;c;AAAA\x07\x1b[2J <b>html</b> [link=http://x]l[/link] $x"


@pytest.mark.parametrize("where", ["reply", "question", "thought", "error", "code"])
def test_no_text_acts_as_markup(where):
    shown = "[bold]b[/]"
    reply = {"thought": f"<think>\n{HOSTILE}\n</think>\n\nok", "code": f"```\n{HOSTILE}\n```"}.get(where, HOSTILE)
    failure = LocalqError(HOSTILE, HOSTILE, HOSTILE)
    app = chat_app([failure] if where == "error" else [reply])

    async def script(pilot):
        await say(pilot, HOSTILE if where == "question" else "hi")
        await pilot.press("ctrl+t")
        await until(pilot, lambda: shown in screen_text(app), "the text as it is")
        assert "\x1b" not in screen_text(app)
        assert "\x07" not in screen_text(app)
        if where == "reply":
            assert "<b>html</b>" in screen_text(app)

    drive_chat(app, script, (100, 40))


def test_slash_commands_answer_in_the_conversation():
    app = chat_app(["hello"])

    async def script(pilot):
        await say(pilot, "hi")
        await say(pilot, "/tokens")
        assert "prompt: " in notices(app)
        await say(pilot, "/nonsense")
        assert "✗ /nonsense: unknown command" in notices(app)
        await say(pilot, "/undo")
        assert "removed: hi" in notices(app)
        assert views(app) == []

    drive_chat(app, script)


def test_two_slashes_send_one():
    app = chat_app(["yes"])

    async def script(pilot):
        await say(pilot, "//etc/passwd")

    drive_chat(app, script)
    assert session_of(app).client.prompts == ["<user>/etc/passwd<assistant>"]


def test_where_a_stream_is_drawn_otherwise_than_the_whole_the_whole_is_drawn(monkeypatch):
    """A reference at the end changes what the beginning means; so does anything that goes wrong while it streams."""
    updates = []
    update = ReplyText.update

    def counted(self, text):
        updates.append(text)
        return update(self, text)

    monkeypatch.setattr(ReplyText, "update", counted)
    linked, plain = "See [this][1].\n\nAnd more.\n\n[1]: http://x\n", ["One\n\n", "```py\nx\n", "```\n\ntwo *three*"]
    go = threading.Event()

    def streams():
        yield linked[:27]
        go.wait(30)
        yield linked[27:]

    app = chat_app(streams(), plain)

    async def script(pilot):
        app.chat.composer.put("a link")
        await pilot.press("enter")
        await until(pilot, lambda: "See [this][1]." in screen_text(app))
        go.set()
        await idle(pilot)
        assert updates[-1] == linked
        assert "See this." in screen_text(app)
        del updates[:]
        await say(pilot, "none")
        assert [each for each in updates if each] == []  # what streamed was the whole

    drive_chat(app, script)


class Lingers(ScriptedClient):
    """Its replies end only after `seen`, when all of them has come."""

    def __init__(self, *scripts, **more):
        super().__init__(*scripts, **more)
        self.seen = threading.Event()

    def generate(self, request):
        yield from super().generate(request)
        assert self.seen.wait(30)


def test_the_end_of_a_reply_breaks_off_nothing_that_is_being_drawn(monkeypatch):
    client, grow = Lingers(["one"], ["two"], reason="length"), TurnView.grow

    async def slow(self, thought, text):
        client.seen.set()  # the reply ends while this goes on
        await asyncio.sleep(0.2)
        await grow(self, thought, text)

    monkeypatch.setattr(TurnView, "grow", slow)
    session = ChatSession(client, Load("path", LoadOptions("model")), CharTokenizer())
    app = LocalqApp(Settings(), session=session)

    async def script(pilot):
        for count, text in enumerate(["one", "two"], 1):
            client.seen.clear()
            await say(pilot, "go")
            assert text in screen_text(app)
            assert screen_text(app).count("stopped at the limit of") == count

    drive_chat(app, script)


@pytest.mark.parametrize("size", [(80, 24), (40, 12)])
def test_the_welcome_stays_above_notices_until_the_first_message(size):
    app = chat_app(["yes"])

    def welcome() -> Widget:
        return app.chat.conversation.transcript.welcome

    async def script(pilot):
        await until(pilot, lambda: "attach a file" in screen_text(app))
        for number in range(2):
            await app.chat.conversation.transcript.notice(f"notice {number}")
        await pilot.pause()
        shown = screen_text(app)
        assert shown.index("attach a file") < shown.index("notice 1")
        assert "Ctrl-P" in shown
        await app.chat.conversation.transcript.sync(app.model.session.conversation)
        assert welcome().display
        await say(pilot, "hello")
        assert not welcome().display
        assert "attach a file" not in screen_text(app)

    drive_chat(app, script, size)
