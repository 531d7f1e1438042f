"""Fetching on a screen: progress in words, stopping and going on, errors with a way back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from textual.pilot import Pilot

from localq import disk, gpus, places
from localq.errors import ExitCode, LocalqError
from localq.files.hub import fetch as hub
from localq.files.hub import parts as download_parts
from localq.settings import Settings
from localq.tui.jobs.thread_messages import StoppedError
from localq.tui.models.opening_screen import PullScreen
from tests.support.files import fake_hub, hub_server
from tests.support.files import uncatalogued_models as unlisted_models
from tests.support.files.fake_hub import FakeHub
from tests.support.files.hub_server import REPO
from tests.support.tui.opening_host import SETTINGS, SIZES, Host
from tests.support.tui.tui_layout import assert_sound
from tests.support.tui.tui_pilot import drive, screen_text, until

MIB = 2**20


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(gpus, "probe", gpus.NvmlReport)
    with hub_server.running(tmp_path, monkeypatch) as server:
        yield server


def model(mib: int) -> dict[str, bytes]:
    """A model that the hub tells to be sound, with so many MiB of weights."""
    values = mib * MIB // 2 // 64
    shard = unlisted_models.shard({"model.embed_tokens.weight": [values, 64]})
    return {**fake_hub.model_files(), "model.safetensors": shard}


def test_a_slow_pull_is_stopped_and_goes_on_where_it_was(server):
    files = model(24)
    size = len(files["model.safetensors"])
    server.add(REPO, files)
    server.slow_after = 12 * MIB
    first, second = PullScreen(REPO, SETTINGS), PullScreen(REPO, SETTINGS)
    host = Host(first)

    async def script(pilot: Pilot[Any]) -> None:
        # Behind the 12.6 MB that come at once: what the server has sent by then has come in too.
        await until(pilot, lambda: "model.safetensors, 13" in screen_text(host), "the weights come")
        assert "MB" in screen_text(host)
        await pilot.press("escape")
        await until(pilot, lambda: host.results, "it stops")
        server.slow_after = None
        await host.push_screen(second, host.results.append)
        await until(pilot, lambda: len(host.results) == 2, "it ends")

    drive(host, script)
    stopped, path = host.results
    assert isinstance(stopped, StoppedError)
    assert hub.read_files(path)
    # 16 MiB is what a kill may lose; a stop loses nothing that came in but what was on its way.
    assert size <= server.sent_of("model.safetensors") <= size + MIB
    asked = [each.headers.get("range") for each in server.seen("GET", "model.safetensors")]
    begun = next(int(each.removeprefix("bytes=").partition("-")[0]) for each in asked if each and each[6:8] != "0-")
    assert begun >= 12 * MIB


def test_what_was_here_is_told_and_not_counted_into_the_rate(server):
    server.add(REPO, model(24))
    server.slow_after = 16 * MIB
    first, second = PullScreen(REPO, SETTINGS), PullScreen(REPO, SETTINGS)
    host, told = Host(first), []

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: download_begun() >= 8 * MIB, "some of it is durable")
        await pilot.press("escape")
        await until(pilot, lambda: host.results)
        server.slow_after = 0
        await host.push_screen(second, host.results.append)
        await until(pilot, lambda: "were already on disk" in screen_text(host))
        told.append(screen_text(host))
        await pilot.press("escape")
        await until(pilot, lambda: len(host.results) == 2)

    drive(host, script)
    assert "of 25.2 MB were already on disk" in told[0]


def download_begun() -> int:
    return sum(each.bytes for each in download_parts.unfinished_parts(places.downloads_dir()))


def test_a_transfer_that_stands_still_is_left_at_once(server):
    server.add(REPO, model(4))
    server.fail("GET /maker/tiny-model/resolve/", cut_after=0, how="stall", times=10)
    host = Host(PullScreen(REPO, SETTINGS))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: server.seen("GET", "/resolve/"))
        await pilot.press("escape")
        await until(pilot, lambda: "Esc again" in screen_text(host))
        await pilot.press("escape")
        await until(pilot, lambda: host.results)

    drive(host, script)
    assert isinstance(host.results[0], StoppedError)


@pytest.mark.parametrize("size", SIZES)
def test_a_gated_model_says_what_to_do_and_the_same_screen_tries_again(server, size):
    repo = server.add(REPO, model(1), gated="auto")
    host, seen = Host(PullScreen(REPO, SETTINGS)), []

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: host.first.error is not None)
        await pilot.pause()
        seen.append(host.first.error)
        assert_sound(host.screen)
        host.screen.query_one("#buttons").scroll_visible(animate=False)
        await pilot.pause()
        assert "Back (Esc)" in screen_text(host)
        repo.gated = False
        await pilot.press("enter")  # "Try again" has the focus
        await until(pilot, lambda: host.results)

    drive(host, script, size=size)
    assert seen[0].exit_code == ExitCode.GATED
    assert "hf auth login" in seen[0].next_step
    assert host.results[0].is_dir()


@pytest.mark.parametrize(
    ("name", "settings", "code", "step"),
    [
        (REPO, Settings(offline=True), ExitCode.NETWORK, "Run the command once without --offline"),
        ("llama-3.3-70b@nf4", Settings(vram="8"), ExitCode.DOES_NOT_FIT, "with a larger --vram"),
        (REPO, SETTINGS, ExitCode.DISK, "Free"),
    ],
)
def test_what_cannot_be_fetched_says_why_and_what_to_do(server, monkeypatch, name, settings, code, step):
    server.add(REPO, model(1))
    if code == ExitCode.DISK:
        monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
    host = Host(PullScreen(name, settings))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "Try again" in screen_text(host))
        assert step in " ".join(screen_text(host).replace("│", " ").split())
        await pilot.press("escape")
        await until(pilot, lambda: host.results)

    drive(host, script)
    assert host.results[0].exit_code == code
    assert server.sent_of("model.safetensors") <= 100_000  # its header, to see whether it fits


def test_an_error_leads_back(server):
    host = Host(PullScreen("maker/there-is-none", SETTINGS))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "Try again" in screen_text(host))
        assert "there-is-none" in screen_text(host)
        assert await pilot.click("#leave")
        await until(pilot, lambda: host.results)

    drive(host, script)
    assert isinstance(host.results[0], LocalqError)


def test_its_keys_can_be_set_and_are_told_as_they_are(server):
    host = Host(PullScreen("maker/there-is-none", SETTINGS))
    host.set_keymap({"opening_leave": "f9", "opening_again": "x"})

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "Try again (x)" in screen_text(host))
        assert "Back (F9)" in screen_text(host)
        asked = len(server.requests)
        await pilot.press("r", "escape")
        assert (len(server.requests), host.results) == (asked, [])
        await pilot.press("x")
        await until(pilot, lambda: len(server.requests) > asked)
        await until(pilot, lambda: "Back (F9)" in screen_text(host))
        await pilot.press("f9")
        await until(pilot, lambda: host.results)

    drive(host, script)
    assert isinstance(host.results[0], LocalqError)


def test_the_spinner_rests_after_an_error_and_turns_when_it_is_tried_again(server, monkeypatch):
    server.add(REPO, model(1), gated="auto")
    go, frames = threading.Event(), []
    host = Host(PullScreen(REPO, SETTINGS))
    spin = PullScreen._spin
    monkeypatch.setattr(PullScreen, "_spin", lambda self: (frames.append(self), spin(self)))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: host.first.error is not None and f"✗ Fetching {REPO}" in screen_text(host))
        count = len(frames)
        await pilot.pause(0.3)
        assert len(frames) == count
        monkeypatch.setattr(PullScreen, "work", lambda self, watcher: go.wait(30))
        await pilot.press("r")
        await until(pilot, lambda: len(frames) > count + 2, "it turns")
        assert "✗" not in screen_text(host)
        go.set()
        await until(pilot, lambda: host.results)

    drive(host, script)
