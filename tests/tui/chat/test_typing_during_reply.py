"""While a reply streams as fast as it can: typing goes on, drawing is seldom, and where one looks stays where it is."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time

from textual.events import Key

from localq.chat.reply import ReplyPiece
from localq.stats import Stats
from localq.tui import preload
from localq.tui.app import LocalqApp
from localq.tui.chat.conversation_view import RESTS
from localq.tui.chat.reply_buffer import EVERY_S, ReplyBuffer
from localq.tui.chat.turn_view import TurnView
from tests.support.tui.tui_pilot import chat_app, drive_chat, idle, say, screen_text, until


def test_keys_arrive_while_thousands_of_pieces_stream(monkeypatch):
    typed, grown = threading.Event(), []
    grow = TurnView.grow

    async def counted(self, thought, text):
        grown.append(text)
        await grow(self, thought, text)

    monkeypatch.setattr(TurnView, "grow", counted)

    def floods():
        end = time.monotonic() + 120  # by then it is seen that typing worked
        for number in itertools.takewhile(lambda _: time.monotonic() < end and not typed.is_set(), itertools.count()):
            yield f"word{number} " if number < 3000 else " "

    app = chat_app(floods())
    app.model.session.max_tokens, app.model.session.loop_guard = 10**9, False

    async def script(pilot):
        app.chat.composer.put("go")
        began = time.monotonic()
        await pilot.press("enter")
        await until(pilot, lambda: "word" in screen_text(app), "the reply")
        for letter in "meanwhile":  # `press` waits two seconds for a processor that has nothing to do
            app.post_message(Key(letter, letter))
        await until(pilot, lambda: app.chat.composer.text == "meanwhile", "the keys")
        assert app.chat.conversation.busy
        typed.set()
        await idle(pilot)
        seconds = time.monotonic() - began
        assert len(grown) <= seconds / EVERY_S + 2
        assert app.chat.composer.text == "meanwhile"

    drive_chat(app, script)


def test_a_feed_loses_nothing_between_two_looks():
    feed = ReplyBuffer()
    for number in range(100):
        feed.put(ReplyPiece(f"t{number} ", Stats(generated_tokens=number), thinking=number < 50))
        if number == 70:
            first = feed.take()
    second = feed.take()
    assert first.thought + second.thought == "".join(f"t{number} " for number in range(50))
    assert first.text + second.text == "".join(f"t{number} " for number in range(50, 100))
    assert second.stats.generated_tokens == 99
    assert feed.take().stats is None


def test_who_scrolled_up_stays_there_until_the_end_is_asked_for():
    go = threading.Event()

    def streams():
        yield "begin\n\n" * 40
        go.wait(30)
        yield "more\n\n" * 40

    app = chat_app(streams(), ["ok"])

    async def script(pilot):
        app.chat.composer.put("go")
        await pilot.press("enter")
        transcript = app.chat.conversation.transcript
        await until(pilot, lambda: transcript.max_scroll_y > 30 and transcript.is_vertical_scroll_end)
        await pilot.press("pageup")
        await pilot.pause()
        place = transcript.scroll_y
        assert place < transcript.max_scroll_y
        go.set()
        await idle(pilot)
        assert transcript.scroll_y == place
        await pilot.press("ctrl+o", "G")
        await until(pilot, lambda: transcript.is_vertical_scroll_end)
        await say(pilot, "next")
        await until(pilot, lambda: "ok" in screen_text(app), "the end is followed again")

    drive_chat(app, script)


def test_drawing_a_stream_takes_a_fifth_of_the_time_at_most(monkeypatch):
    """The rest is for keys, however long the conversation is that is laid out each time."""
    began, ended, enough = [], [], threading.Event()
    grow = TurnView.grow

    async def slow(self, thought, text):
        began.append(time.monotonic())
        await asyncio.sleep(0.1)
        await grow(self, thought, text)
        ended.append(time.monotonic())
        if len(ended) == 4:
            enough.set()

    monkeypatch.setattr(TurnView, "grow", slow)

    def streams():
        while not enough.wait(0.01):
            yield "word "

    app = chat_app(streams())

    async def script(pilot):
        app.chat.composer.put("go")
        await pilot.press("enter")
        await until(pilot, enough.is_set)
        await idle(pilot)
        assert "word" in screen_text(app)

    drive_chat(app, script)
    pauses = [after - before for before, after in zip(ended[:3], began[1:4], strict=True)]
    assert min(pauses) >= RESTS * 0.1 * 0.95


def frozen_anew(thresholds):
    """Garbage collection as the tests before had it, and nothing of this one in what it leaves out."""
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc.collect()
    gc.freeze()


def test_garbage_is_not_looked_for_in_what_was_there_before_the_first_word(monkeypatch):
    app = chat_app([])

    async def script(pilot):
        monkeypatch.setattr(LocalqApp, "is_headless", property(lambda self: False))  # tests share a process: not there
        await app.use_model(app.model)
        monkeypatch.undo()
        assert gc.get_freeze_count() > 10_000

    thresholds = gc.get_threshold()
    gc.unfreeze()  # what tests/conftest.py has frozen
    try:
        drive_chat(app, script)
    finally:
        frozen_anew(thresholds)


def test_everything_is_looked_through_when_a_reply_has_ended_and_seldom_before():
    thresholds, looked = gc.get_threshold(), []
    app = chat_app(["word " * 50])

    def see(phase, info):
        if phase == "start" and info["generation"] == 2:
            looked.append(app.chat.conversation.busy)

    async def script(pilot):
        preload.tune_garbage_collection()
        gc.callbacks.append(see)
        await say(pilot, "go")
        gc.callbacks.remove(see)

    try:
        drive_chat(app, script)
        assert gc.get_threshold()[2] == preload.SELDOM > thresholds[2]
        assert looked == [False]
    finally:
        frozen_anew(thresholds)
