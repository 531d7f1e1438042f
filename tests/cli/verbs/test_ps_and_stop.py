"""`localq ps` and `stop` over real sockets; a model that a server holds is what an unnamed one means."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator

import pytest

from localq.chat.open_options import OpenOptions
from localq.cli import default_model, execute
from localq.cli.verbs import ps
from localq.errors import ExitCode
from localq.server.model import ModelRequest
from localq.server.slot import Slot
from localq.server.user_socket import UserSocket
from localq.settings import Settings
from localq.worker import shared
from localq.worker.messages import ServerStatus
from tests.support.server.scripted_model import Models, QuietWatcher

LOADED = ServerStatus(7, "qwen3-8b", "1", "http://127.0.0.1:8000", "nf4", "cuda", 32_768, 6 * 10**9, loaded=True)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name in ("config", "data", "cache", "runtime"):
        monkeypatch.setenv(f"LOCALQ_{name.upper()}", str(tmp_path / name))
    monkeypatch.delenv("LOCALQ_MODEL", raising=False)
    return tmp_path / "runtime"


@pytest.fixture
def servers(monkeypatch) -> Iterator[list[UserSocket]]:
    """Two servers of this process, which hold the models a and b."""
    made: list[UserSocket] = []
    for number, name in enumerate("ab"):
        request, pid = ModelRequest(name), os.getpid() + number
        slot = Slot(QuietWatcher(), opener=Models())
        slot.open(request, QuietWatcher())
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        served = UserSocket(slot, request, lambda: None)
        status = ServerStatus(pid, name, "1", loaded=True)
        monkeypatch.setattr(served, "status", lambda status=status: status)
        served.stop = lambda served=served: threading.Thread(target=served.close).start()  # type: ignore[method-assign]
        served.open()
        made.append(served)
    yield made
    for each in made:
        each.close()
        each.slot.close(0.0)


def pids(capsys: pytest.CaptureFixture[str]) -> list[int]:
    assert execute(["ps", "--json"]) == ExitCode.OK
    return [each["pid"] for each in json.loads(capsys.readouterr().out)["servers"]]


def test_no_server(capsys):
    assert execute(["ps"]) == ExitCode.OK
    assert execute(["stop"]) == ExitCode.OK
    assert capsys.readouterr().err.splitlines() == [
        "no server is running; start one with `localq serve MODEL`",
        "no server is running",
    ]
    assert execute(["ps", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["servers"] == []
    assert execute(["stop", "a"]) == ExitCode.UNKNOWN_MODEL


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "idle"),
        ({"unloads_at": 1090.0}, "idle, unloads in 2 min"),
        ({"unloads_at": 990.0}, "idle, unloads in 0 s"),
        ({"busy": True}, "answering"),
        ({"busy": True, "queued": 3}, "answering, 3 waiting"),
        ({"loading": True, "loaded": False}, "loading"),
        ({"loaded": False}, "unloaded"),
    ],
)
def test_states_in_words(changes, words):
    status = ServerStatus(**{**LOADED.__dict__, **changes})
    assert ps.state(status, 1000.0) == words


def test_a_line_says_what_the_server_holds():
    assert ps.row(LOADED, 0.0) == [
        *("qwen3-8b", "nf4", "idle", "6.0 GB (cuda)", "32,768", "http://127.0.0.1:8000", "7"),
    ]
    empty = ServerStatus(7, "qwen3-8b", "1")
    assert ps.row(empty, 0.0) == ["qwen3-8b", "-", "unloaded", "-", "-", "-", "7"]


def test_one_of_several_must_be_named(servers, capsys):
    first, second = pids(capsys)
    assert execute(["stop"]) == ExitCode.USAGE
    assert "2 servers are running: a, b" in capsys.readouterr().err
    assert execute(["stop", "b"]) == ExitCode.OK
    assert pids(capsys) == [first]
    assert execute(["stop", "b"]) == ExitCode.UNKNOWN_MODEL
    assert execute(["stop", str(first), "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["stopped"] == [{"model": "a", "pid": first}]
    assert second != first
    assert pids(capsys) == []


def test_all(servers, capsys):
    assert execute(["stop", "--all"]) == ExitCode.OK
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert pids(capsys) == []


def test_a_server_that_does_not_end_is_told(servers, capsys, monkeypatch):
    monkeypatch.setattr(shared.SharedEngine, "stop", lambda self: False)
    assert execute(["stop", "a"]) == ExitCode.FAILURE
    assert "kill -9" in capsys.readouterr().err


def test_without_a_name_the_model_of_a_server_is_used(servers, capsys):
    opening = default_model.choose(Settings(), OpenOptions(), named=False, on_screen=False)
    assert opening.settings.model == "a"
    assert "which `localq serve` has loaded" in capsys.readouterr().err
    assert default_model.choose(Settings(model="x"), OpenOptions(), named=True, on_screen=False).settings.model == "x"
    fresh = default_model.choose(Settings(), OpenOptions(fresh=True), named=False, on_screen=False, quiet=True)
    assert fresh.settings.model != "a"
