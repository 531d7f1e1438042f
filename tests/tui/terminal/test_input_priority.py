"""A key is drawn before what streams, however long that takes: in which order, and how much at once, not how soon."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

from textual.events import Key
from textual.widgets import Static

from localq.tui.chat.status_line import StatusLine
from localq.tui.chat.transcript_lines import Notice
from localq.tui.reply.reply_text import CodeBlock, ReplyText
from localq.tui.terminal.input_priority import PATIENCE_S, InputPriority
from localq.tui.terminal.terminal_input import TerminalDriver
from tests.support.tui.tui_pilot import chat_app, drive_chat, idle, say, screen_text, until


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_keys_wait_until_they_are_answered_or_for_as_long_as_there_is_patience():
    clock = Clock()
    keys = InputPriority(clock)
    assert not keys.is_waiting
    keys.key_read()
    clock.now_s += 0.9 * PATIENCE_S
    keys.key_read()
    keys.key_handled()
    assert keys.is_waiting, "the second"
    clock.now_s += 0.2 * PATIENCE_S
    assert not keys.is_waiting
    keys.forget()
    keys.key_handled()  # late
    keys.key_read()
    assert keys.is_waiting
    keys.key_handled()
    assert not keys.is_waiting


def test_a_key_counts_from_when_it_is_read(monkeypatch):
    sent = []
    monkeypatch.setattr("textual.driver.Driver.send_message", lambda self, message: sent.append(message))
    driver = TerminalDriver.__new__(TerminalDriver)
    driver._input_priority = InputPriority(Clock())
    driver.send_message(Key("f5", None))
    assert not driver._input_priority.is_waiting
    driver.send_message(Key("x", "x"))
    assert driver._input_priority.is_waiting
    assert [each.key for each in sent] == ["f5", "x"]


def test_a_key_that_waits_is_drawn_before_the_next_piece():
    go, end, shown = threading.Event(), threading.Event(), []

    def streams():
        yield "begin "
        go.wait(30)
        yield "later"
        end.wait(30)

    app = chat_app(streams())
    app.input_priority = InputPriority(Clock())  # which stands still: patience has no end

    async def script(pilot):
        conversation = app.chat.conversation
        app.chat.composer.put("go")
        await pilot.press("enter")
        await until(pilot, lambda: "begin" in screen_text(app))
        app.input_priority.key_read()
        go.set()
        await until(pilot, lambda: conversation._feed._texts)
        for _ in range(3):
            conversation._remind()
            await pilot.pause()
        reply = app.screen.query(ReplyText).last()
        assert reply.source == "begin "
        app.post_display_hook = lambda: shown.append((app.chat.composer.text, reply.source))
        await pilot.press("x")
        await until(pilot, lambda: "later" in screen_text(app))
        end.set()
        await idle(pilot)
        assert reply.source == "begin later"
        assert next(source for text, source in shown if text == "x") == "begin "

    drive_chat(app, script)


def test_code_is_coloured_in_full_though_a_key_waits_first():
    """Colouring pauses between slices while a key waits, and goes on when patience ends."""
    code = "\n".join(f"x{line} = 1" for line in range(400))
    app = chat_app([f"```python\n{code}\n```\n\nthe end"])
    app.input_priority = InputPriority(clock := Clock())

    async def script(pilot):
        app.chat.composer.put("go")
        await pilot.press("enter")
        app.input_priority.key_read()
        for _ in range(20):
            await asyncio.sleep(0.01)
        clock.now_s += 2 * PATIENCE_S
        await until(pilot, lambda: "the end" in screen_text(app))
        await idle(pilot)
        assert code in app.screen.query(ReplyText).last().source

    drive_chat(app, script)


def test_nothing_is_laid_out_while_a_key_waits():
    app = chat_app(["ok"])
    app.input_priority = InputPriority(clock := Clock())

    async def script(pilot):
        await say(pilot, "go")
        app.input_priority.key_read()
        await app.chat.conversation.transcript.notice("a line more")
        for _ in range(3):
            app.screen._on_timer_update()
            await asyncio.sleep(0)
        assert app.screen._layout_required
        clock.now_s += 2 * PATIENCE_S
        await until(pilot, lambda: not app.screen._layout_required and "a line more" in screen_text(app))
        assert not app.input_priority.is_waiting

    drive_chat(app, script)


def test_a_letter_is_drawn_by_itself_even_while_others_are_changed_as_one(monkeypatch):
    app, shown = chat_app(["ok"]), []

    async def script(pilot):
        await say(pilot, "go")
        composer, display = app.chat.composer, app._display

        def seen(screen, update):
            if not app._batch_count and update is not None:
                shown.append(({y for y, _, _ in update.spans}, app.screen._layout_required))
            display(screen, update)

        monkeypatch.setattr(app, "_display", seen)
        with app.batch_update():
            app.chat.conversation.transcript.refresh(layout=True)
            composer.post_message(Key("x", "x"))
            await until_shown(shown)
        rows = set(composer.region.line_range)
        assert shown[0][0]
        assert shown[0][0] <= rows
        await pilot.pause()
        await until(pilot, lambda: not app.screen._layout_required)
        assert composer.text == "x"
        assert any(each - rows for each, _ in shown), "the others come with the next frame"

    drive_chat(app, script)


def test_a_key_comes_between_what_is_laid_out_and_what_is_painted(monkeypatch):
    app, shown, after = chat_app(["ok"]), [], []
    app.input_priority = InputPriority(Clock())

    async def script(pilot):
        await say(pilot, "go")
        chat, composer, display = app.chat, app.chat.composer, app._display

        def seen(screen, update):
            shown.append(set() if update is None else {y for y, _, _ in update.spans})
            display(screen, update)

        app.input_priority.key_read()
        notice = Notice("a line more", failed=False)
        await chat.conversation.transcript.mount(notice)
        chat.conversation.call_after_refresh(after.append, "drawn")
        while not chat._layout_required:
            await asyncio.sleep(0.005)
        monkeypatch.setattr(app, "_display", seen)
        app.input_priority.key_handled()
        chat._on_timer_update()
        assert notice.region.height
        assert shown == [], "laid out, not painted"
        app.input_priority.key_read()
        chat._on_timer_update()
        assert shown == [], "while a key waits"
        chat.draw_first(composer)
        assert shown[0] <= set(composer.region.line_range), "the key, and nothing else"
        app.input_priority.key_read()  # so that no frame comes
        assert not after
        line = chat.query_one(StatusLine)
        chat.status(doing="meanwhile")
        while line not in chat._dirty_widgets:
            await asyncio.sleep(0.005)
        assert len(shown) == 1
        app.input_priority.key_handled()
        with app.batch_update():
            chat._on_timer_update()
            assert len(shown) == 1, "not while much is changed as one, when nothing is shown"
        chat._on_timer_update()
        assert set(notice.region.line_range) | set(line.region.line_range) <= shown[1]
        await until(pilot, lambda: after == ["drawn"])

    drive_chat(app, script)


def test_a_chat_that_another_screen_lies_on_comes_to_rest():
    app = chat_app(["ok"])

    async def script(pilot):
        await say(pilot, "go")
        await pilot.press("f1")
        await until(pilot, lambda: app.screen is not app.chat)
        await app.chat.conversation.transcript.notice("a line more")
        await pilot.pause()
        for _ in range(3):
            app.chat.refresh(layout=True)
            await until(pilot, lambda: not app.chat._layout_required)
            app.chat._on_timer_update()
            assert not app.chat._update_timer._active.is_set(), "it is drawn for ever"

    drive_chat(app, script)


def test_that_a_reply_stops_is_seen_before_all_else_is_drawn(monkeypatch):
    end = threading.Event()

    def streams():
        yield "begin "
        end.wait(30)

    app, shown = chat_app(streams()), []
    app.input_priority = InputPriority(Clock())  # which stands still: no frame comes while a key waits

    async def script(pilot):
        app.chat.composer.put("go")
        await pilot.press("enter")
        await until(pilot, lambda: "begin" in screen_text(app))
        app.input_priority.key_read()
        display = app._display

        def seen(screen, update):
            if update is not None:
                shown.append({y for y, _, _ in update.spans})
            display(screen, update)

        monkeypatch.setattr(app, "_display", seen)
        app.chat.conversation.stop_job()
        await until_shown(shown)
        line = app.chat.query_one(StatusLine)
        assert line.status.stopping
        assert shown == [set(line.region.line_range)]
        app.input_priority.forget()
        end.set()
        await idle(pilot)

    drive_chat(app, script)


async def until_shown(shown):
    for _ in range(1000):
        if shown:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nothing was drawn")


def test_parts_of_a_reply_are_measured_once_while_it_grows(monkeypatch):
    measured, app = Counter(), chat_app(["ok"])
    height = CodeBlock.get_content_height

    def counted(self, container, viewport, width):
        measured[id(self)] += 1
        return height(self, container, viewport, width)

    monkeypatch.setattr(CodeBlock, "get_content_height", counted)

    async def script(pilot):
        view = await app.chat.conversation.transcript.begin(reading=False)
        await view.grow("", "```py\nx = [1]\n```\n\n")
        first = view.query_one(CodeBlock)
        await until(pilot, lambda: first.region.height)
        await pilot.pause()
        before = measured[id(first)]
        for number in range(5):
            high = view.region.height
            await view.grow("", f"Paragraph {number}.\n\n")
            await until(pilot, lambda high=high: view.region.height > high)
        assert measured[id(first)] <= before + 1, "a scrollbar may have come"

    drive_chat(app, script)


def test_who_is_shown_is_told_once_whoever_asked_for_a_place_before():
    """Textual finds who is new by a map that is made anew for whoever asks behind a scroll: they were told nothing."""
    told = []

    class Told(Static):
        def on_show(self):
            told.append(self.region.width)

    app = chat_app()

    async def script(pilot):
        chat = app.chat
        late = Told("late")
        late.display = False
        await chat.mount(late)
        await idle(pilot)
        assert told == []
        late.display = True
        chat._compositor._full_map_invalidated = True  # as a scroll leaves it
        assert late in chat._compositor.full_map
        await until(pilot, lambda: told)
        chat.refresh(layout=True)
        await idle(pilot)
        await pilot.pause()
        assert len(told) == 1
        assert told[0] > 0

    drive_chat(app, script)
