"""The panel in an app: what it shows, at every size."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from localq.gpus import Process
from localq.tui.instruments.instrument_panel import InstrumentPanel, InstrumentsScreen
from localq.tui.instruments.instrument_widget import Instrument
from tests.support.tui.instruments_lab import CPU, GPU, MIB, PROFILE, READING, Watch, chatting, reply, run, settle
from tests.support.tui.tui_pilot import screen_text, until

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_side_shows_all_instruments():
    async def scene(app, pilot):
        await chatting(app, pilot)
        text = screen_text(app)
        for said in ("80.0 tok/s", "80% of 99.6", "936 GB/s (rated)", "64 °C", "Decode step", "at 1,024 tokens",
                     "host gap 12.5", "RTX 3090", "firefox 640 MiB"):  # fmt: skip
            assert said in text
        assert app.watch_card.uuids == ["GPU-5a1b"]

    run("side", (40, 50), scene)


def test_the_strip_shows_speed_and_memory_in_six_lines_below_a_blank_one():
    async def scene(app, pilot):
        await chatting(app, pilot)
        assert app.panel.region.height == 7
        blank, *rows = screen_text(app).splitlines()
        assert not blank.strip()
        assert "80.0 tok/s" in rows[0]
        assert "23.0 of 24.0 GiB" in rows[0]
        assert "80% of 99.6" in rows[5]
        assert "weights 16,000 MiB" in rows[2]
        assert "CUDA 420 MiB" in rows[4]
        assert not any("Decode step" in row or "MHz" in row for row in rows)

    run("strip", (100, 30), scene)


@pytest.mark.parametrize(("size", "columns"), [((80, 24), 2), ((200, 60), 2), ((40, 12), 1)])
def test_the_whole_screen_has_two_columns_where_there_is_room(size, columns):
    async def scene(app, pilot):
        await chatting(app, pilot)
        speed, card = app.query_one("#speed"), app.query_one("#card")
        assert (card.region.x > speed.region.x) == (columns == 2)
        assert (card.region.y > speed.region.y) == (columns == 1)
        if size == (80, 24):  # all of it, without scrolling
            text = screen_text(app)
            assert "host RAM" in text
            assert "at 1,024 tokens" in text

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


def named(count: int) -> Watch:
    """A card on which that many other programs have memory."""
    return Watch(replace(READING, processes=tuple(Process(each, 640 * MIB, f"p{each}") for each in range(count))))


@pytest.mark.parametrize("seldom", [False, True])
def test_all_rows_of_a_reply_have_room_whatever_was_drawn_before(seldom):
    """A drawing for another reason in between must not leave an instrument in the rows that it had before the reply."""

    async def scene(app, pilot):
        app.panel.show_model(GPU)
        await until(pilot, lambda: app.panel.facts.reading.total)
        await settle(pilot, app.panel)
        for tokens in range(1, 242, 8):
            app.panel.show_stats(reply(tokens, used=400))
            if seldom:
                app.query_one("#speed").render()
        await settle(pilot, app.panel)
        text = screen_text(app)
        assert "80% of 99.6" in text
        assert "936 GB/s (rated)" in text
        for each in app.query(Instrument):
            assert each.size.height == len(each.lines(each.content_size.width))

    run("side", (40, 50), scene)


ROWS = 35  # of all instruments at the side, without names of other programs


@pytest.mark.parametrize(("names", "height", "levels"), [
    (0, 60, 0), (0, ROWS, 0), (0, ROWS - 1, 1), (2, ROWS + 2, 0), (2, ROWS + 1, 1), (2, ROWS, 2), (2, ROWS - 2, 3),
    (2, ROWS - 3, 3), (2, ROWS - 4, 4), (2, ROWS - 5, 0), (2, 12, 0),
])  # fmt: skip
def test_rows_are_dropped_only_where_that_saves_scrolling_and_the_limit_never(names, height, levels):
    async def scene(app, pilot):
        await chatting(app, pilot)
        await settle(pilot, app.panel)
        shown = [row.plain for each in app.query(Instrument) for row in each.lines(each.content_size.width)]
        assert any(row.startswith("limit ") and "80% of" in row for row in shown)
        said = {
            "planned": any(row.startswith("planned ") for row in shown),
            "names": any(row.startswith("  p0 ") for row in shown) or not names,
            "graph": sum(row.endswith("█") for row in app_graph(app)) == 4,
            "source": any("936 GB/s (rated)" in row for row in shown),
        }
        kept = [name for name, is_kept in said.items() if is_kept]
        assert kept == [name for place, name in enumerate(said) if place >= levels or (name == "names" and not names)]
        assert (app.panel.max_scroll_y > 0) == (height < ROWS - 4)

    run("side", (40, height), scene, watch=named(names))


def app_graph(app) -> list[str]:
    """Rows of the graph."""
    speed = app.query_one("#speed")
    return [row.plain for row in speed.lines(speed.content_size.width) if "█" in row.plain]


def test_parts_of_the_bar_stand_out_in_every_theme():
    async def scene(app, pilot):
        await chatting(app, pilot)
        for name in app.available_themes:
            app.theme = name
            await pilot.pause()
            bar = app.screen._compositor.render_strips()[app.query_one("#memory").region.y + 1]
            drawn = [part for part in bar if set(part.text.strip()) & set("█░▒")]
            colours = [(part.style.color, part.style.bgcolor) for part in drawn]
            assert all(ink.is_default or ink != paper for ink, paper in colours), name
            assert len({ink for ink, _ in colours}) >= 4, name

    run("side", (40, 50), scene)


def test_the_cpu_has_no_card_no_roof_and_no_step():
    async def scene(app, pilot):
        await chatting(app, pilot, CPU)
        text = screen_text(app)
        assert "buffers" in text
        assert not any(each in text for each in ("limit", "MHz", "Decode step", "GPU", "CUDA"))
        assert not app.query_one("#card").region.height
        assert app.watch_card.reads == app.wanted == 0

    run("side", (40, 40), scene)


# ---- the whole screen, over a chat


def test_over_a_chat_that_has_no_room_beside():
    async def scene(app, pilot):
        app.panel.display = False
        await pilot.pause()
        app.panel.show_model(GPU)
        await app.push_screen(InstrumentsScreen(app.panel))
        await until(pilot, lambda: app.wanted == 1)  # through the panel behind, to the chat's screen
        app.panel.show_stats(reply(1, used=400))  # the chat goes on telling its own panel
        app.panel.show_stats(reply(161, used=400))
        app.panel.show_profile(PROFILE)
        await until(pilot, lambda: app.watch_card.reads)
        await settle(pilot, app.screen.query_one(InstrumentPanel))
        text = screen_text(app)
        assert "80.0 tok/s" in text
        assert "at 1,024 tokens" in text
        await pilot.press("f2")
        await pilot.pause()
        assert not isinstance(app.screen, InstrumentsScreen)
        assert len(app.panel.facts.changed) == 1  # nobody draws for a screen that is gone

    run("side", (80, 24), scene)
