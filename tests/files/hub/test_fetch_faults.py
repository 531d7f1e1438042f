"""Fetching when something is wrong: gates, missing things, a failing hub, a full disk, a kill; every cause by name."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from localq.errors import ExitCode
from localq.files.hub import cache as hub_cache
from localq.files.hub import errors as hub_errors
from localq.files.hub import fetch as hub
from localq.files.hub import pauses
from tests.support.files import fake_hub, hub_server
from tests.support.files.hub_server import REPO, TOKEN, refused, source

ROOT = Path(__file__).parents[3]


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        yield server


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_gated_model_says_where_its_licence_is(server, monkeypatch, token):
    server.add(REPO, fake_hub.model_files(), gated="manual")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    for call in (lambda: hub.fetch(source()), lambda: hub.fetch(source(gated=True))):
        error = refused(call)
        assert error.exit_code == ExitCode.GATED
        assert f"{server.url}/{REPO}" in str(error)
        assert "hf auth login" in str(error)
    assert not token or server.seen("GET", "/resolve/")[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert server.fetched() == []


def test_an_accepted_token_opens_a_gated_model(server, monkeypatch):
    server.add(REPO, fake_hub.model_files(), gated="auto", allowed_tokens=frozenset({TOKEN}))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub_cache.is_complete(hub.fetch(source(gated=True)))


def test_a_wrong_token_is_said_to_be_wrong(server, monkeypatch):
    server.add(REPO, fake_hub.model_files())
    monkeypatch.setenv("HF_TOKEN", "wrong")
    error = refused(hub.fetch, source())
    assert error.exit_code == ExitCode.GATED
    assert "token" in str(error)


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_missing_repository_or_revision_is_exit_4(server, monkeypatch, token):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert refused(hub.fetch_repo, "maker/nothing").exit_code == ExitCode.UNKNOWN_MODEL
    server.add(REPO, fake_hub.model_files())
    error = refused(hub.fetch_repo, REPO, "v9")
    assert error.exit_code == ExitCode.UNKNOWN_MODEL
    assert "v9" in str(error)


@pytest.mark.parametrize("where", ["GET /api/models", "GET /maker/tiny-model/res"])
@pytest.mark.parametrize("statuses", [(503, 500), (429, 429)])
def test_passing_faults_are_tried_again(server, where, statuses):
    server.add(REPO, fake_hub.model_files())
    server.fail(where, *statuses, Retry_After="1")
    assert hub_cache.is_complete(hub.fetch(source()))
    assert server.faults == []


@pytest.mark.parametrize("where", ["GET /api/models", "GET /maker/tiny-model/resolve"])
def test_a_hub_that_stays_down_is_a_network_error(server, where):
    server.add(REPO, fake_hub.model_files())
    server.fail(where, *[503] * 40)
    error = refused(hub.fetch, source())
    assert error.exit_code == ExitCode.NETWORK
    assert len([each for each in server.requests if each.status == 503]) == len(hub_errors.PAUSES_S) + 1


def test_nobody_answering_is_a_network_error(server, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    error = refused(hub.fetch, source())
    assert error.exit_code == ExitCode.NETWORK
    assert "127.0.0.1:9" in str(error)


@pytest.mark.parametrize("body", [b"<html>log in to the hotel network</html>", b"[]", b'{"id": "x"}', b'{"sha": "x"}'])
def test_something_else_than_a_hub_is_a_network_error(server, monkeypatch, body):
    monkeypatch.setattr(fake_hub._Handler, "_info", lambda self, *given: self._send(200, body, {}))
    assert refused(hub.fetch, source()).exit_code == ExitCode.NETWORK


def test_the_token_stays_with_the_hub(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.add(REPO, fake_hub.model_files())
    with fake_hub.FakeHub() as cdn:
        server.cdn = cdn
        assert hub_cache.is_complete(hub.fetch(source()))
        assert [each.path.partition("/")[2][:4] for each in cdn.requests] == ["blob"]
        assert TOKEN not in json.dumps([each.headers for each in cdn.requests])
    assert all(each.headers["authorization"] == f"Bearer {TOKEN}" for each in server.seen("GET"))


def test_the_token_stays_with_the_hub_when_the_repository_is_said_to_be_elsewhere(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.add(REPO, fake_hub.model_files())
    with fake_hub.FakeHub() as other:
        other.add(REPO, fake_hub.model_files())
        for where in ("GET /api/models", f"GET /{REPO}/resolve"):
            server.fail(where, 307, Location=f"{other.url}/api/models/{REPO}/revision/main?blobs=true")
        assert hub_cache.is_complete(hub.fetch(source()))  # the second answer is no file, and is asked for again
        assert len(other.requests) == 2
        assert TOKEN not in json.dumps([each.headers for each in other.requests])


def test_a_repository_that_was_renamed_is_followed_within_the_hub(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.add(REPO, fake_hub.model_files())
    server.fail("/generation_config.json", 307, Location=f"/{REPO}/resolve/{fake_hub.COMMIT}/generation_config.json")
    assert hub_cache.is_complete(hub.fetch(source()))
    asked = server.seen("GET", "/generation_config.json")
    assert [each.headers.get("authorization") for each in asked] == [f"Bearer {TOKEN}"] * 2


def test_a_disk_that_is_too_small_is_found_before_the_first_byte(server, monkeypatch):
    server.add(REPO, fake_hub.model_files())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1234))
    error = refused(hub.fetch, source())
    assert error.exit_code == ExitCode.DISK
    needed = sum(map(len, fake_hub.model_files().values()))
    assert f"{needed:,}" in str(error)
    assert "1,234" in str(error)
    assert server.fetched() == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_fills_up_meanwhile_is_exit_9(server, monkeypatch, number):
    server.add(REPO, fake_hub.model_files())

    def broken(*given, **options):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("os.write", broken)
        assert refused(hub.fetch, source()).exit_code == ExitCode.DISK
    assert hub.local_source(source()) is None
    assert hub_cache.is_complete(hub.fetch(source()))


def test_an_interrupt_leaves_nothing_that_looks_complete(server):
    server.add(REPO, fake_hub.model_files())

    def interrupt(what, done, total):
        if what == "model.safetensors" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.fetch(source(), interrupt)
    assert hub.local_source(source()) is None
    assert hub_cache.is_complete(hub.fetch(source()))


def test_what_another_tool_has_begun_is_left(server):
    server.add(REPO, fake_hub.model_files())
    blobs = hub_cache.repo_folder(REPO) / "blobs"
    blobs.mkdir(parents=True)
    begun = blobs / f"{'1' * 64}.0a1b2c3d.incomplete"
    begun.write_bytes(b"half of it")
    os.utime(begun, (time.time() - 3600,) * 2)
    assert hub_cache.is_complete(hub.fetch(source()))
    assert hub_cache.incomplete_files(REPO) == [begun]


def test_a_fresh_process_asks_for_nothing_but_the_model_and_prints_nothing(server, tmp_path):
    """Telemetry, warnings and tokens would show here: the client library runs as a user's process has it."""
    server.add(REPO, fake_hub.model_files())
    server.fail("GET /api/models", 503)
    code = (
        "import time; time.sleep = lambda s: None; from localq.files.hub import fetch;"
        f"print(fetch.fetch_repo({REPO!r}))"
    )
    environment = {**os.environ, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert [each.path for each in server.requests if not each.path.startswith((f"/{REPO}/", "/api/models/"))] == []


def test_pauses_follow_the_server_and_end(monkeypatch):
    slept = []
    monkeypatch.setattr(pauses, "pause", lambda seconds, why: slept.append(seconds))

    class Refused(Exception):
        response = SimpleNamespace(status_code=429, headers={"Retry-After": "100000"})

    def call():
        raise Refused

    assert refused(hub_errors.with_retries, call, REPO, "main").exit_code == ExitCode.NETWORK
    assert slept == [hub_errors.LONGEST_PAUSE_S] * len(hub_errors.PAUSES_S)
