"""What the list of models does with files: fetches, removes, tells; and its dialogs at every size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from localq.files import catalog, local_models
from localq.files.hub import fetch as hub
from localq.planner import model_facts
from localq.settings import Settings
from localq.tui.models.opening_screen import PullScreen
from localq.tui.models.picker_dialogs import ConsentScreen, DetailsScreen, RemoveScreen, details
from tests.support.common import privileges
from tests.support.files import cached_models, fake_hub
from tests.support.files import uncatalogued_models as unlisted_models
from tests.support.files.fake_hub import FakeHub
from tests.support.files.hub_server import REPO
from tests.support.tui.picker_host import MIB, SETTINGS, Host, few_models, note, picked, rows
from tests.support.tui.tui_layout import assert_sound
from tests.support.tui.tui_pilot import screen_text, until

SIZES = [(80, 24), (200, 60), (40, 12)]
NASTY = "evil/x[red]\u202eok"


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[FakeHub]:
    with few_models(tmp_path, monkeypatch) as server:
        yield server


def test_fetching_from_the_list_stops_and_goes_on_in_the_same_row(server):
    files = unlisted_models.model()
    del files["model.safetensors"]  # which would be taken for all of it
    server.add(REPO, files)
    server.slow_after = 2 * MIB

    async def stopped(pilot: Pilot[Any], host: Host) -> None:
        await until(pilot, lambda: "model-00002-of-00002.safetensors," in screen_text(host))
        await pilot.press("escape")
        await until(pilot, lambda: host.screen is host.picker)

    async def script(pilot: Pilot[Any], host: Host) -> None:
        await host.push_screen(PullScreen(REPO, SETTINGS), host.picker._pulled)
        await stopped(pilot, host)
        await until(pilot, lambda: REPO in rows(host))
        assert host.picker._rows[0].verdict == "incomplete"
        await pilot.press(*"tiny", "down", "p")
        await stopped(pilot, host)
        await until(pilot, lambda: "To resume: p" in screen_text(host))
        await until(pilot, lambda: "MB on disk" in host.picker._rows[0].place)
        server.slow_after = None
        await pilot.press("p")
        await until(pilot, lambda: host.picker._rows[0].verdict == "on the CPU")
        assert "on disk" in host.picker._rows[0].place

    picked(script)
    assert hub.local_path(catalog.resolve(REPO)) is not None


def test_what_cannot_be_fetched_is_said_in_the_list(server):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        await pilot.press(*"smollm3", "down", "p")
        await until(pilot, lambda: isinstance(host.screen, ConsentScreen))
        await pilot.press("y")
        await until(pilot, lambda: "Try again" in screen_text(host))
        await pilot.press("escape")
        await until(pilot, lambda: host.screen is host.picker)
        assert "smollm3" in screen_text(host)

    picked(script)


def test_a_large_download_is_asked_about_with_size_place_and_time(server):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        await pilot.press(*"smollm3", "down", "p")
        await until(pilot, lambda: isinstance(host.screen, ConsentScreen) and "about 8 min" in screen_text(host))
        text = screen_text(host)
        assert "smollm3-3b: download 6.2 GB?" in text
        assert "6.2 GB from HuggingFaceTB/SmolLM3-3B, about 8 min at 100" in text
        assert "disk: 6.2 GB in" in text
        await pilot.press("enter")  # "no" has the focus
        await until(pilot, lambda: host.screen is host.picker)

    picked(script)
    assert server.requests == []


@pytest.mark.parametrize("by_mouse", [True, False])
def test_removing_asks_first_and_says_what_was_freed(server, by_mouse):
    cached_models.put(REPO, fake_hub.model_files())
    cached_models.put("maker/other", unlisted_models.model())

    async def script(pilot: Pilot[Any], host: Host) -> None:
        await pilot.press(*"tiny", "down", "d")
        await until(pilot, lambda: isinstance(host.screen, RemoveScreen))
        assert "Another tool downloaded some of these files" in screen_text(host)
        await pilot.press("enter")  # what has the focus keeps it
        await until(pilot, lambda: host.screen is host.picker)
        assert local_models.matching(REPO)
        await pilot.press("d")
        await until(pilot, lambda: isinstance(host.screen, RemoveScreen))
        await (pilot.click("#yes") if by_mouse else pilot.press("y"))
        await until(pilot, lambda: "freed" in screen_text(host))
        await until(pilot, lambda: REPO not in rows(host))

    picked(script)
    assert [each.name for each in local_models.list_local()] == ["maker/other"]


def test_what_this_user_may_not_read_is_one_line_among_the_others(server):
    """In a cache that users share."""
    cached_models.put(REPO, fake_hub.model_files())
    folder = cached_models.put("maker/private", fake_hub.model_files()).parents[1]

    async def script(pilot: Pilot[Any], host: Host) -> None:
        await until(pilot, lambda: host.picker._rows and host.picker._rows[0].verdict != "...")
        assert {REPO, "maker/private", "llama-3.1-8b"} <= set(rows(host))
        await pilot.press(*"private")
        await until(pilot, lambda: set(rows(host)) == {"maker/private"})
        await pilot.press("down")
        await until(pilot, lambda: host.picker.row is not None and "unreadable" in screen_text(host))
        await pilot.press("d")
        await until(pilot, lambda: "Permission denied" in note(host))  # on the screen, a path breaks its line anywhere
        assert host.screen is host.picker
        assert_sound(host.screen)

    with privileges.closed(folder):
        picked(script, (160, 40))


def test_details_are_those_of_show(server):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        await pilot.press(*"llama-3.1-8b", "down", "i")
        await until(pilot, lambda: "8.03 billion" in screen_text(host))
        assert isinstance(host.screen, DetailsScreen)
        await pilot.press("escape")
        await until(pilot, lambda: host.screen is host.picker)

    picked(script)


def test_details_go_on_below_where_the_screen_is_narrow(server):
    folder = cached_models.put(REPO, fake_hub.model_files())

    async def script(pilot: Pilot[Any], host: Host) -> None:
        await pilot.press("down", "i")
        await until(pilot, lambda: "on this machine" in screen_text(host))
        await pilot.resize_terminal(60, 24)
        await pilot.pause()
        assert str(folder) in "".join(line.strip("│ ") for line in screen_text(host).splitlines())

    picked(script)


def test_details_have_a_title_a_total_the_words_of_the_instruments_and_no_scrollbar_at_the_bottom(server):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        await pilot.press(*"llama-3.1-8b", "down", "i")
        await until(pilot, lambda: "8.03 billion" in screen_text(host))
        await pilot.pause()
        shown = screen_text(host)
        assert "Details of llama-3.1-8b" in shown
        facts = host.screen.query_one("#facts")
        assert not facts.show_horizontal_scrollbar
        assert facts.virtual_size.width <= facts.size.width
        told = facts.query_one("#lines", Static).render()
        assert "published as:" in str(told)
        sizes = dict(re.findall(r"(?m)^ {2}(\S.*?) +([\d,.]+) MiB$", str(told)))
        assert {"weights", "KV cache", "buffers", "CUDA", "total"} <= set(sizes)
        assert not [name for name in sizes if "_" in name]
        total = float(sizes.pop("total").replace(",", ""))
        assert total == pytest.approx(sum(float(each.replace(",", "")) for each in sizes.values()), abs=1)

    picked(script, (80, 24), Settings(vram="24"))


def test_every_component_that_is_planned_has_the_name_of_a_part():
    """Of a model with experts, and with a 16-bit head; a part without one would be shown under its own name."""
    for name in ("llama-3.1-8b", "gpt-oss-20b"):
        facts = model_facts.of_name(name, Settings(vram="24"))
        lines = [line for line in details(facts) if line.endswith("MiB")]
        assert lines
        assert not [line for line in lines if "_" in line]


@pytest.mark.parametrize("size", SIZES)
def test_nothing_overlaps_and_nothing_is_out_of_reach(server, size):
    cached_models.put(NASTY.replace("\u202e", ""), fake_hub.model_files())

    async def script(pilot: Pilot[Any], host: Host) -> None:
        assert_sound(host.screen)
        assert "evil/x[red]ok" in screen_text(host)  # no markup
        await pilot.press("down", "d")
        await until(pilot, lambda: isinstance(host.screen, RemoveScreen))
        await pilot.pause()
        assert_sound(host.screen)
        await pilot.press("escape", "i")
        await until(pilot, lambda: isinstance(host.screen, DetailsScreen))
        await pilot.pause()
        assert_sound(host.screen)

    picked(script, size)
