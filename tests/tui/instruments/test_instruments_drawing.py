"""How seldom the instruments are drawn and the card is asked, and what a driver that does not answer costs."""

from __future__ import annotations

import threading
import time

import pytest
from textual.app import App, ComposeResult
from textual.containers import Container
from textual.screen import ModalScreen, Screen

from localq.tui.instruments import instrument_panel
from localq.tui.instruments.instrument_facts import InstrumentFacts
from localq.tui.instruments.instrument_panel import InstrumentPanel
from localq.tui.instruments.instrument_widget import Instrument
from tests.support.tui.instruments_lab import CPU, GPU, Clock, Watch, chatting, reply, run, settle
from tests.support.tui.tui_pilot import drive, screen_text, until

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def draws(monkeypatch):
    """The ids of the widgets that were drawn."""
    found: list[str] = []
    before = Instrument.render

    def counted(self):
        found.append(self.id)
        return before(self)

    monkeypatch.setattr(Instrument, "render", counted)
    return found


def test_a_thousand_events_are_one_drawing(draws):
    async def scene(app, pilot):
        app.panel.show_model(GPU)
        await until(pilot, lambda: app.panel.facts.reading.total)
        await settle(pilot, app.panel)
        draws.clear()
        for tokens in range(1, 1001):
            app.panel.show_stats(reply(tokens))
        assert draws == []
        await settle(pilot, app.panel)
        assert draws.count("speed") == 1
        assert draws.count("memory") <= 1

    run("side", (40, 50), scene)


def test_a_stream_is_drawn_eight_times_a_second_at_most(draws):
    async def scene(app, pilot):
        app.panel.show_model(GPU)
        await settle(pilot, app.panel)
        draws.clear()
        began, tokens = time.monotonic(), 0
        while draws.count("speed") < 5:
            tokens += 1
            app.panel.show_stats(reply(tokens, 80.0 + tokens / 10))  # a speed that stays is drawn once
            await pilot.pause(0.005)
        assert time.monotonic() - began >= 5 / instrument_panel.FRAMES  # a busy machine only draws less
        assert tokens > 5

    run("side", (40, 50), scene)


def test_what_has_not_changed_is_not_drawn(draws):
    async def scene(app, pilot):
        await chatting(app, pilot)
        draws.clear()
        app.panel.show_stats(reply(241, used=400))
        await settle(pilot, app.panel)
        assert draws == []

    run("side", (40, 50), scene)


def test_an_event_costs_microseconds():
    """Of processor time, on average over 20,000 events: 1 % of a step of 1.5 ms would be 15."""
    facts = InstrumentFacts(Clock(), Watch())
    facts.load(GPU)
    events = [reply(tokens, 600.0) for tokens in range(1, 20_001)]
    began = time.thread_time()
    for each in events:
        facts.add(each)
    assert (time.thread_time() - began) / len(events) < 15e-6


def test_a_hidden_panel_draws_nothing_and_asks_nothing(draws):
    async def scene(app, pilot):
        app.panel.display = False
        await until(pilot, lambda: not app.panel.is_visible)
        draws.clear()
        app.panel.show_model(GPU)
        for tokens in range(1, 100):
            app.panel.show_stats(reply(tokens))
        app.panel.end_reply()
        app.clock.now += 10
        app.panel._tick()
        await pilot.pause(0.3)
        assert (draws, app.watch_card.reads, app.wanted) == ([], 0, 0)
        assert not app.panel._ticks._active.is_set()
        app.panel.display = True  # and then all of it is there
        await until(pilot, lambda: app.wanted and app.watch_card.reads)
        await settle(pilot, app.panel)
        assert "80.0 tok/s" in screen_text(app).splitlines()[0]
        assert app.panel._ticks._active.is_set()

    run("side", (40, 50), scene)


def test_a_panel_behind_another_screen_asks_nothing(draws):
    async def scene(app, pilot):
        await settle(pilot, app.panel)
        await app.push_screen(Screen())
        draws.clear()
        app.panel.show_model(GPU)
        app.panel.show_stats(reply(50))
        app.panel._tick()
        await pilot.pause(0.3)
        assert (draws, app.watch_card.reads, app.wanted) == ([], 0, 0)

    run("side", (40, 50), scene)


def test_behind_a_dialog_it_asks_and_draws_when_that_is_gone(draws):
    """One character that changes behind a dialog has all of the screen written again."""

    async def scene(app, pilot):
        await settle(pilot, app.panel)
        await app.push_screen(ModalScreen())
        draws.clear()
        app.panel.show_model(GPU)
        await until(pilot, lambda: app.watch_card.reads == 1)
        app.panel._tick()
        app.panel.show_stats(reply(50))
        await pilot.pause(2 / instrument_panel.FRAMES)
        assert draws == []
        await app.pop_screen()
        await until(pilot, lambda: draws)

    run("side", (40, 50), scene)


def test_a_panel_in_a_hidden_place_asks_nothing():
    class Nested(App[None]):
        def __init__(self):
            super().__init__()
            self.watch_card = Watch()
            self.panel = InstrumentPanel(facts=InstrumentFacts(Clock(), self.watch_card))

        def compose(self) -> ComposeResult:
            with Container(id="place"):
                yield self.panel

    async def scene(pilot):
        app.query_one("#place").display = False
        await pilot.pause()
        app.panel.show_model(GPU)
        app.panel._tick()
        await pilot.pause(0.2)
        assert app.watch_card.reads == 0

    app = Nested()
    drive(app, scene, (120, 40))


def test_the_card_is_asked_once_a_second_in_another_thread():
    threads: list[threading.Thread] = []

    class Slow(Watch):
        def read(self):
            threads.append(threading.current_thread())
            return super().read()

    async def scene(app, pilot):
        app.panel.show_model(GPU)
        await settle(pilot, app.panel)
        for _ in range(20):
            app.panel._tick()
        await settle(pilot, app.panel)
        assert app.watch_card.reads == 1
        app.clock.now += 1
        app.panel._tick()
        await until(pilot, lambda: app.watch_card.reads == 2)

    run("side", (40, 50), scene, watch=Slow())
    assert all(thread is not threading.main_thread() and thread.daemon for thread in threads)


def test_a_driver_that_does_not_answer_is_not_asked_again_and_holds_nothing_up():
    answered = threading.Event()

    class Stuck(Watch):
        def read(self):
            self.reads += 1
            answered.wait(20)
            return self.reading

    async def scene(app, pilot):
        app.panel.show_model(GPU)
        for _ in range(5):
            app.clock.now += 1
            app.panel._tick()
        app.panel.show_stats(reply(81))
        await until(pilot, lambda: "80.0 tok/s" in screen_text(app).splitlines()[0])
        assert app.watch_card.reads == 1

    began = time.monotonic()
    run("side", (40, 50), scene, watch=Stuck())
    assert time.monotonic() - began < 15  # the app has ended, and the driver still says nothing
    answered.set()


def test_what_the_card_said_of_another_model_is_dropped():
    async def scene(app, pilot):
        app.panel.show_model(CPU)
        await settle(pilot, app.panel)
        app.panel.post_message(InstrumentPanel.Sensed(GPU, app.watch_card.reading))
        await pilot.pause()
        assert app.panel.facts.reading.celsius is None

    run("side", (40, 50), scene)
