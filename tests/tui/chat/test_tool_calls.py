"""Tool calls on the full screen, over a real server and a scripted engine: the question, the reply with its calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.widgets import Button

from localq.chat.open_conversation import Start
from localq.chat.tools.permissions import Decision, Permission
from localq.chat.tools.toolbox import Toolbox
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.chat.attachment_chips import Chip
from localq.tui.chat.call_screen import CallScreen
from localq.tui.chat.round_view import RoundView
from localq.tui.chat.transcript_lines import Notice
from tests.support.chat.tool_chats import NAME, call, forget, serve, tool_session
from tests.support.tui.tui_pilot import drive_chat, idle, say, screen_text, until

ADD = call("add", a=1, b=2)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    with serve(tmp_path_factory.mktemp("home")) as box:
        yield box


@pytest.fixture
def box(served: Toolbox) -> Toolbox:
    forget(served)
    return served


def app_over(box: Toolbox, *scripts) -> LocalqApp:
    return LocalqApp(Settings(), Start(toolbox=box), session=tool_session(box, *scripts))


async def send(pilot, text: str) -> None:
    chat = pilot.app.chat
    chat.composer.put(text)
    pilot.app.set_focus(chat.composer)
    await pilot.press("enter")


async def asked(pilot) -> None:
    await until(pilot, lambda: isinstance(pilot.app.screen, CallScreen), "the question")
    await pilot.pause()


def notices(app) -> str:
    return "\n".join(str(each.render()) for each in app.chat.query(Notice))


def test_a_call_is_asked_for_and_drawn_in_its_reply(box):
    app = app_over(box, f"<think>hm</think>Let me **see**.{ADD}", "It is 3.", "Fine.")

    async def script(pilot):
        await until(pilot, lambda: f"tools: 9 from {NAME}" in notices(app))
        await send(pilot, "go")
        await asked(pilot)
        text = screen_text(app)
        for part in (f"Call add from {NAME}?", "a: 1", "b: 2", "No (Esc)", "Once (Y)", "This session (S)", "Never (V)"):
            assert part.lower() in text.lower()
        assert app.screen.focused.id == "no"
        await pilot.press("y")
        await idle(pilot)
        assert app.screen is app.chat
        text = screen_text(app)
        for part in ("Let me see.", f'✓ {NAME}: add {{"a": 1, "b": 2}}', "It is 3.", "thought (1 words)"):
            assert part in text
        assert text.index("Let me see.") < text.index("✓") < text.index("It is 3.")
        assert box.permission(box.find("add")) is Permission.ASK
        chip = app.chat.query_one(Chip)
        chip.toggle()
        await pilot.pause()
        assert "3" in screen_text(app).split("It is 3.")[0].split("✓")[1]
        await say(pilot, "and")
        assert "Fine." in screen_text(app)

    drive_chat(app, script, size=(100, 40))


@pytest.mark.parametrize(
    ("key", "result", "kept"),
    [
        ("s", "3", Permission.ALLOWED),
        ("n", "the user did not allow this call", Permission.ASK),
        ("escape", "the user did not allow this call", Permission.ASK),
        ("enter", "the user did not allow this call", Permission.ASK),  # "no" has the focus
        ("v", "the user does not allow this tool", Permission.NEVER),
    ],
)
def test_answers_by_key(box, key, result, kept):
    app = app_over(box, ADD, "Well.")

    async def script(pilot):
        await send(pilot, "go")
        await asked(pilot)
        await pilot.press(key)
        await idle(pilot)
        assert "Well." in screen_text(app)
        (round,) = app.model.session.messages[-1].rounds
        assert round.calls[0].result == result
        assert box.permission(box.find("add")) is kept

    drive_chat(app, script)


def test_an_answer_by_mouse_and_a_stop_at_the_question(box):
    app = app_over(box, ADD, "Well.", ADD, "Again.")

    async def script(pilot):
        await send(pilot, "go")
        await asked(pilot)
        app.screen.query_one("#session", Button).press()
        await idle(pilot)
        assert box.permission(box.find("add")) is Permission.ALLOWED
        box.set_permission("add", Permission.ASK)
        await send(pilot, "more")
        await asked(pilot)
        await pilot.press("ctrl+c")
        await idle(pilot)
        assert app.screen is app.chat
        kept = app.model.session.messages[-1]
        assert (kept.complete, kept.rounds[0].calls[0].result) == (False, "stopped by the user")
        assert "cut" in screen_text(app)
        await say(pilot, "/continue")
        assert "Again." in screen_text(app)
        assert len(app.chat.query(RoundView)) == 2

    drive_chat(app, script, size=(100, 40))


def test_a_call_that_runs_is_stopped_by_escape(box):
    box.set_permission("wait", Permission.ALLOWED)
    app = app_over(box, call("wait", seconds=30), "never")

    async def script(pilot):
        await send(pilot, "go")
        await until(pilot, lambda: "running wait" in screen_text(app))
        await pilot.press("escape")
        await idle(pilot)
        assert app.model.session.messages[-1].rounds[0].calls[0].result == "stopped by the user"

    drive_chat(app, script)


def test_texts_of_strangers_are_drawn_as_text(box):
    box.asker = None
    hostile = call("hostile")
    app = app_over(box, call("note", text="[red]\u202e[/]\n/exit [link='x']"), "Well.", hostile, "[b]Done[/b].")

    async def script(pilot):
        await send(pilot, "go")
        await asked(pilot)
        assert r'text: "[red]\u202e[/]\n/exit [link=' in screen_text(app)
        await pilot.press("n")
        await idle(pilot)
        assert "✗" in screen_text(app)
        box.set_permission("hostile", Permission.ALLOWED)
        await say(pilot, "more")
        await say(pilot, "/tools")
        for chip in app.chat.query(Chip):
            chip.toggle()
        await pilot.pause()
        assert app.is_running
        assert "\x1b" not in notices(app)
        assert "\u202e" not in screen_text(app)

    drive_chat(app, script, size=(120, 60))


def test_the_answers_stay_on_the_screen_below_long_arguments(box):
    app = app_over(box, call("note", text=" ".join(map(str, range(1000)))), "Well.")

    async def script(pilot):
        await send(pilot, "go")
        await asked(pilot)
        text = screen_text(app)
        assert "Call note from" in text
        assert "Never (v)" in text
        assert 'text: "0 1 2 3' in text
        app.screen.query_one("#arguments").scroll_end(animate=False)
        await pilot.pause()
        assert '999"' in screen_text(app)
        await pilot.press("n")
        await idle(pilot)

    drive_chat(app, script)


def test_quitting_at_a_question_leaves(box):
    app = app_over(box, ADD, "never")

    async def script(pilot):
        await send(pilot, "go")
        await asked(pilot)
        await pilot.press("ctrl+q")
        await until(pilot, lambda: not app.is_running or app._exit)

    assert drive_chat(app, script) == 0
    assert app.model.session.messages[-1].rounds[0].calls[0].result == "stopped by the user"


def test_a_saved_conversation_draws_its_calls(box, tmp_path: Path):
    session = tool_session(box, ADD, "It is 3.")
    box.asker = lambda question: question.answer(Decision.ONCE)
    list(session.ask("go"))
    app = app_over(box, "More.")

    async def script(pilot):
        app.model.session.switch_to(session.record)
        await app.chat.conversation.draw()
        await pilot.pause()
        assert f"✓ {NAME}: add" in screen_text(app)
        await say(pilot, "on")
        assert "<tool>3<assistant>It is 3.<user>on" in app.model.session.client.prompts[-1]

    drive_chat(app, script)
