"""A hub that asks to wait: the full screen counts down, and leaving ends the pause."""

from __future__ import annotations

import time

import pytest

from localq.files.hub import client as hub_client
from localq.settings import Settings
from localq.tui.jobs.job import Job
from localq.tui.jobs.thread_messages import Fetching, StoppedError
from localq.tui.models.opening_screen import PullScreen
from tests.support.files import raw_hub
from tests.support.tui.tui_pilot import chat_app, drive_chat, screen_text, until


@pytest.fixture
def hub(tmp_path, monkeypatch):
    for name in ("LOCALQ_DATA", "LOCALQ_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with raw_hub.running(lambda link, path: raw_hub.send(link, b"503 busy\r\nRetry-After: 300")) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_a_job_posts_the_countdown_and_ends_when_it_is_stopped(hub):
    posted = []
    job = Job("maker/model", lambda watcher: hub_client.list_files("maker/model", "main"), posted.append)
    job.start()
    end_s = time.monotonic() + 30
    while not any(isinstance(each, Fetching) for each in posted):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert posted[0].what == f"retrying in 300 s: {hub.url} returned HTTP status 503"
    job.stop()
    while not any(isinstance(each, Job.Ended) for each in posted):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert isinstance(job.take(), StoppedError)
    assert len(hub.requests) == 1


def test_the_screen_of_a_download_counts_down_and_is_left(hub):
    app = chat_app(["ok"])

    async def script(pilot):
        left = []
        app.push_screen(PullScreen("maker/model", Settings()), left.append)
        await until(pilot, lambda: "Retrying in 299 s" in screen_text(app))
        await until(pilot, lambda: "Retrying in 298 s" in screen_text(app))
        await pilot.press("escape")
        await until(pilot, lambda: left)
        assert isinstance(left[0], StoppedError)

    drive_chat(app, script)
