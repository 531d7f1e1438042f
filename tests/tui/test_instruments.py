"""The panel in an app: what it shows at every size, how seldom it draws, that it asks nothing while nobody sees it."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from instruments_lab import CPU, GPU, PROFILE, Clock, Host, Watch, reply
from textual.app import App, ComposeResult
from textual.containers import Container
from textual.screen import ModalScreen, Screen
from tui_pilot import drive, screen_text, until

from localq.stats import Stats
from localq.tui import instruments
from localq.tui.instrument import Instrument
from localq.tui.instrument_facts import Facts
from localq.tui.instruments import InstrumentsPanel, InstrumentsScreen


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCALQ_CACHE", str(tmp_path))


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


async def settle(pilot, panel: InstrumentsPanel) -> None:
    """Until what is due is drawn and the card was looked at."""
    await until(pilot, lambda: not panel._drawing and not panel.facts.looking)
    await pilot.pause()


def run(mode: str, size: tuple[int, int], scene, **of_host) -> Host:
    app = Host(mode, **of_host)
    drive(app, lambda pilot: scene(app, pilot), size)
    return app


async def chatting(app: Host, pilot, loaded=GPU) -> None:
    """A model, half a reply, a profile, and the card."""
    app.panel.show_loaded(loaded)
    for tokens in range(1, 242, 8):
        app.panel.show_stats(reply(tokens, used=400))
    if loaded is GPU:
        app.panel.show_profile(PROFILE)
    await until(pilot, lambda: app.panel.facts.reading.total)
    await settle(pilot, app.panel)


# ---- what is shown


def test_the_side_shows_all_instruments():
    async def scene(app, pilot):
        await chatting(app, pilot)
        text = screen_text(app)
        for said in ("tok/s now 80.0", "80 % of what 936 GB/s allow (rated)", "GPU 97 %, 64 °C", "Decode step at 1,024",
                     "host gap      12.5", "Memory of RTX 3090", "firefox 640 MiB"):  # fmt: skip
            assert said in text
        assert app.watch_card.uuids == ["GPU-5a1b"]

    run("side", (40, 50), scene)


def test_the_strip_shows_speed_and_memory_in_six_lines():
    async def scene(app, pilot):
        await chatting(app, pilot)
        assert app.panel.size.height == 6
        rows = screen_text(app).splitlines()
        assert "tok/s now 80.0, mean 80.0, roof 99.6" in rows[0]
        assert "Memory 21,916 MiB, planned 22,021 (-0.5%)" in rows[0]
        assert "80 % of what 936 GB/s allow (rated)" in rows[5]
        assert "C CUDA 400" in rows[4]
        assert not any("Decode step" in row or "MHz" in row for row in rows)

    run("strip", (100, 30), scene)


@pytest.mark.parametrize(("size", "columns"), [((80, 24), 2), ((200, 60), 2), ((40, 12), 1)])
def test_the_whole_screen_has_two_columns_where_there_is_room(size, columns):
    async def scene(app, pilot):
        await chatting(app, pilot)
        speed, memory = app.query_one("#speed"), app.query_one("#memory")
        assert (memory.region.x > speed.region.x) == (columns == 2)
        assert (memory.region.y > speed.region.y) == (columns == 1)
        if size == (80, 24):  # all of it, without scrolling
            text = screen_text(app)
            assert "a token in all" in text
            assert "firefox" in text

    run("full", size, scene)


@pytest.mark.parametrize("mode", ["side", "strip", "full"])
def test_every_size_is_drawn_and_nothing_is_wider_than_its_place(mode):
    async def scene(app, pilot):
        await chatting(app, pilot)
        for size in ((120, 40), (100, 30), (80, 24), (40, 12), (7, 3), (1, 1), (200, 60), (1, 60), (200, 1)):
            await pilot.resize_terminal(*size)
            await settle(pilot, app.panel)
            shown = [each for each in app.query(Instrument) if each.display]
            places = [app.screen.find_widget(each).visible_region for each in shown]
            assert not any(one.overlaps(other) for one, other in itertools.combinations(places, 2)), size
            for instrument in shown:
                width = max(0, instrument.content_size.width)
                assert all(row.cell_length <= width for row in instrument.lines(width)), (size, instrument)
            assert all(len(row) <= size[0] for row in screen_text(app).splitlines())

    run(mode, (200, 60), scene)


def test_letters_stand_out_in_every_theme():
    async def scene(app, pilot):
        await chatting(app, pilot)
        for name in app.available_themes:
            app.theme = name
            await pilot.pause()
            bar = app.screen._compositor.render_strips()[app.query_one("#memory").region.y + 1]
            drawn = [part for part in bar if set(part.text.strip()) & set("WHKkSGCO")]
            assert len(drawn) >= 8
            colours = [(part.style.color, part.style.bgcolor) for part in drawn]
            assert all(ink.is_default or ink != paper for ink, paper in colours), name

    run("side", (40, 50), scene)


def test_the_cpu_has_no_card_no_roof_and_no_step():
    async def scene(app, pilot):
        await chatting(app, pilot, CPU)
        text = screen_text(app)
        assert "no roof: a share of the bandwidth is" in text
        assert "only the fused step of a GPU is" in text
        assert "Memory of this machine" in text
        assert "MHz" not in text
        assert not app.query_one("#card").region.height
        assert app.watch_card.reads == app.wanted == 0

    run("side", (40, 40), scene)


# ---- how seldom


def test_a_thousand_events_are_one_drawing(draws):
    async def scene(app, pilot):
        app.panel.show_loaded(GPU)
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
        app.panel.show_loaded(GPU)
        await settle(pilot, app.panel)
        draws.clear()
        began, tokens = time.monotonic(), 0
        while draws.count("speed") < 5:
            tokens += 1
            app.panel.show_stats(reply(tokens))
            await pilot.pause(0.005)
        assert time.monotonic() - began >= 5 / instruments.FRAMES  # a busy machine only draws less
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
    facts = Facts(Clock(), Watch())
    facts.load(GPU)
    events = [reply(tokens, 600.0) for tokens in range(1, 20_001)]
    began = time.thread_time()
    for each in events:
        facts.add(each)
    assert (time.thread_time() - began) / len(events) < 15e-6


def test_a_hidden_panel_draws_nothing_and_asks_nothing(draws):
    async def scene(app, pilot):
        app.panel.display = False
        await until(pilot, lambda: not app.panel.can_be_seen)
        draws.clear()
        app.panel.show_loaded(GPU)
        for tokens in range(1, 100):
            app.panel.show_stats(reply(tokens))
        app.panel.reply_ended()
        app.clock.now += 10
        app.panel._tick()
        await pilot.pause(0.3)
        assert (draws, app.watch_card.reads, app.wanted) == ([], 0, 0)
        assert not app.panel._ticks._active.is_set()
        app.panel.display = True  # and then all of it is there
        await until(pilot, lambda: app.wanted and app.watch_card.reads)
        await settle(pilot, app.panel)
        assert "tok/s mean 80.0" in screen_text(app).splitlines()[0]
        assert app.panel._ticks._active.is_set()

    run("side", (40, 50), scene)


def test_a_panel_behind_another_screen_asks_nothing(draws):
    async def scene(app, pilot):
        await settle(pilot, app.panel)
        await app.push_screen(Screen())
        draws.clear()
        app.panel.show_loaded(GPU)
        app.panel.show_stats(reply(50))
        app.panel._tick()
        await pilot.pause(0.3)
        assert (draws, app.watch_card.reads, app.wanted) == ([], 0, 0)

    run("side", (40, 50), scene)


def test_a_dialog_above_does_not_stop_what_is_seen_behind_it():
    async def scene(app, pilot):
        await app.push_screen(ModalScreen())
        app.panel.show_loaded(GPU)
        await until(pilot, lambda: app.watch_card.reads == 1)

    run("side", (40, 50), scene)


def test_a_panel_in_a_hidden_place_asks_nothing():
    class Nested(App[None]):
        def __init__(self):
            super().__init__()
            self.watch_card = Watch()
            self.panel = InstrumentsPanel(facts=Facts(Clock(), self.watch_card))

        def compose(self) -> ComposeResult:
            with Container(id="place"):
                yield self.panel

    async def scene(pilot):
        app.query_one("#place").display = False
        await pilot.pause()
        app.panel.show_loaded(GPU)
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
        app.panel.show_loaded(GPU)
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
        app.panel.show_loaded(GPU)
        for _ in range(5):
            app.clock.now += 1
            app.panel._tick()
        app.panel.show_stats(reply(81))
        await until(pilot, lambda: "mean 80.0" in screen_text(app).splitlines()[0])
        assert app.watch_card.reads == 1

    began = time.monotonic()
    run("side", (40, 50), scene, watch=Stuck())
    assert time.monotonic() - began < 15  # the app has ended, and the driver still says nothing
    answered.set()


def test_what_the_card_said_of_another_model_is_dropped():
    async def scene(app, pilot):
        app.panel.show_loaded(CPU)
        await settle(pilot, app.panel)
        app.panel.post_message(InstrumentsPanel.Sensed(GPU, app.watch_card.reading))
        await pilot.pause()
        assert app.panel.facts.reading.celsius is None

    run("side", (40, 50), scene)


# ---- profiles


def test_a_profile_is_asked_for_after_a_load_and_again_when_the_context_has_grown():
    async def scene(app, pilot):
        app.panel.show_loaded(GPU)
        await until(pilot, lambda: app.wanted == 1)
        app.panel._tick()
        app.panel.reply_ended()
        await pilot.pause()
        assert app.wanted == 1  # it was asked, and not answered yet
        app.panel.show_profile(PROFILE)
        app.panel.show_stats(reply(10, used=4000))
        app.panel._tick()
        await pilot.pause()
        assert app.wanted == 1  # not while a reply runs
        app.panel.reply_ended()
        await until(pilot, lambda: app.wanted == 2)

    run("side", (40, 50), scene)


def test_the_key_asks_for_one_now_or_behind_the_reply():
    async def scene(app, pilot):
        await chatting(app, pilot)
        before = app.wanted
        app.panel.focus()
        await pilot.press("k")
        await pilot.pause()
        assert app.wanted == before
        app.panel.show_stats(Stats("done", 100, generated_tokens=241, decode_s=3.0, context_used=400))
        app.panel.reply_ended()
        await until(pilot, lambda: app.wanted == before + 1)
        app.panel.show_no_profile("no room")
        await pilot.press("k")
        await until(pilot, lambda: app.wanted == before + 2)

    run("side", (40, 50), scene)


def test_its_keys_can_be_set():
    async def scene(app, pilot):
        app.set_keymap({"instruments_profile": "x", "instruments_leave": "z"})
        await chatting(app, pilot)
        app.panel.reply_ended()
        await app.push_screen(InstrumentsScreen(app.panel))
        await pilot.press("escape", "q", "k")
        assert isinstance(app.screen, InstrumentsScreen)
        app.screen.query_one(InstrumentsPanel).focus()
        before = app.wanted
        await pilot.press("k")
        await pilot.pause()
        assert app.wanted == before
        await pilot.press("x")
        await until(pilot, lambda: app.wanted == before + 1)
        await pilot.press("z")
        assert not isinstance(app.screen, InstrumentsScreen)

    run("side", (40, 50), scene)


def test_what_failed_is_tried_again_behind_the_next_reply():
    async def scene(app, pilot):
        app.panel.show_loaded(GPU)
        await until(pilot, lambda: app.wanted == 1)
        app.panel.show_no_profile("the model was at work")
        app.panel._tick()
        await pilot.pause()
        assert app.wanted == 1
        app.panel.show_stats(reply(10))
        app.panel.reply_ended()
        await until(pilot, lambda: app.wanted == 2)
        await until(pilot, lambda: "the model was at work" in screen_text(app))

    run("side", (40, 50), scene)


def test_a_strip_that_shows_no_profile_asks_for_none():
    async def scene(app, pilot):
        app.panel.show_loaded(GPU)
        await settle(pilot, app.panel)
        assert app.wanted == 0
        app.panel.mode = "side"
        await until(pilot, lambda: app.wanted == 1)

    run("strip", (100, 30), scene)


# ---- the whole screen, over a chat


def test_over_a_chat_that_has_no_room_beside():
    async def scene(app, pilot):
        app.panel.display = False
        await pilot.pause()
        app.panel.show_loaded(GPU)
        await app.push_screen(InstrumentsScreen(app.panel))
        await until(pilot, lambda: app.wanted == 1)  # through the panel behind, to the chat's screen
        app.panel.show_stats(reply(1, used=400))  # the chat goes on telling its own panel
        app.panel.show_stats(reply(161, used=400))
        app.panel.show_profile(PROFILE)
        await until(pilot, lambda: app.watch_card.reads)
        await settle(pilot, app.screen.query_one(InstrumentsPanel))
        text = screen_text(app)
        assert "tok/s now 80.0" in text
        assert "Decode step at 1,024" in text
        await pilot.press("f2")
        await pilot.pause()
        assert not isinstance(app.screen, InstrumentsScreen)
        assert len(app.panel.facts.changed) == 1  # nobody draws for a screen that is gone

    run("side", (80, 24), scene)
