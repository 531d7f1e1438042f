"""The setting `keep_alive`: a process in the background holds the model for the next front end. Real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localq.chat import background
from localq.errors import LocalqError
from localq.planner.load_options import LoadOptions
from localq.server import background as server_background
from localq.server.model import ModelRequest
from localq.server.slot import Slot
from localq.settings import OF_ENGINE, Settings
from localq.worker import shared
from localq.worker.client import EngineClient
from localq.worker.messages import Load
from tests.support.cli.cli_processes import environment_of, localq
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.server.scripted_model import Models

QUESTION = ("--max-tokens", "4", "--temp", "0")
HINT = "the model stays in memory until it has been idle for 10m; to unload it, run `localq stop`"


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("keep-alive")
    made = environment_of(folder, make_checkpoint(folder / "tiny", initializer_range=0.15))
    yield {**made, "TERM": "dumb", "LOCALQ_KEEP_ALIVE": "10m"}
    localq(made, "stop", "--all")


def servers(environment: dict[str, str]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(localq(environment, "ps", "--json").stdout)["servers"]
    return found


def test_the_second_front_end_loads_nothing(environment):
    model = environment["LOCALQ_MODEL"]
    plain = localq({**environment, "LOCALQ_KEEP_ALIVE": "0"}, "run", model, "Hello", *QUESTION)
    assert servers(environment) == []
    first = localq(environment, "run", model, "Hello", *QUESTION)
    second = localq(environment, "run", model, "Hello", *QUESTION)
    assert plain.returncode == first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert plain.stdout == first.stdout == second.stdout
    assert HINT in first.stderr
    assert HINT not in second.stderr
    (server,) = servers(environment)
    assert (server["model"], server["loaded"], server["url"]) == ("tiny", True, "")
    assert isinstance(server["unloads_at"], float)
    assert "cached" in second.stderr  # its prompt was in the cache of the first


def test_other_options_and_fresh_start_an_engine_of_their_own(environment):
    model = environment["LOCALQ_MODEL"]
    before = servers(environment)
    assert len(before) == 1
    for option in (("--fresh",), ("--ctx", "64")):
        done = localq(environment, "run", model, "Hello", *QUESTION, *option)
        assert done.returncode == 0, done.stderr
        assert "cached" not in done.stderr
    assert [each["pid"] for each in servers(environment)] == [each["pid"] for each in before]


def test_stop_ends_the_engine_too(environment):
    (server,) = servers(environment)
    pid = int(str(server["pid"]))
    engines = [each for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()]
    assert engines
    assert localq(environment, "stop").returncode == 0
    assert servers(environment) == []
    assert not [each for each in (str(pid), *engines) if _runs(int(each))]
    assert not list((Path(environment["LOCALQ_CACHE"]) / "run").glob("*.sock"))


def _runs(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody waits for does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LOCALQ_RUNTIME", str(tmp_path / "run"))
    return tmp_path / "run"


def test_a_process_that_does_not_start_is_told(folder, monkeypatch):
    monkeypatch.setattr(background, "MODULE", "localq.no_such_module")
    assert background.start("a", None, Settings(keep_alive="10m")) is None
    assert "no_such_module" in background.log_file().read_text()
    assert background.log_file().stat().st_mode & 0o077 == 0


def test_a_folder_of_others_is_not_used(folder, tmp_path):
    """Another user could have made it, in a shared folder, with a link in the place of the log."""
    own = tmp_path / "precious"
    own.write_text("text")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / background.LOG).symlink_to(own)
    with pytest.raises(LocalqError, match="other users can open this folder"):
        background.start("a", None, Settings(keep_alive="10m"))
    assert own.read_text() == "text"
    assert [each.name for each in folder.iterdir()] == [background.LOG]


def test_its_settings_are_those_of_the_front_end(monkeypatch):
    monkeypatch.setenv("LOCALQ_CTX", "77")
    monkeypatch.setenv("LOCALQ_VRAM", "8")
    found = background._environment(Settings(ctx=4096, kv="8", keep_alive="2h"))
    assert (found["LOCALQ_CTX"], found["LOCALQ_KV"], found["LOCALQ_KEEP_ALIVE"]) == ("4096", "8", "2h")
    assert "LOCALQ_VRAM" not in found
    assert {f"LOCALQ_{name.upper()}" for name in OF_ENGINE if getattr(Settings(), name) is not None} <= {*found}


@pytest.mark.parametrize(
    ("value", "wanted"), [(None, False), ("0", False), ("0s", False), ("10m", True), ("never", True)]
)
def test_only_where_it_is_asked_for(value, wanted):
    assert background.is_wanted(Settings(keep_alive=value)) == wanted


def serve(monkeypatch: pytest.MonkeyPatch, keep_alive_s: float | None, first_s: float = 60.0) -> threading.Event:
    """A background server in threads of this process; the event is set when it has ended."""
    monkeypatch.setattr(server_background, "LOOK_S", 0.01)
    monkeypatch.setattr(server_background, "Slot", lambda watcher, seconds: Slot(watcher, seconds, opener=Models()))
    ended = threading.Event()

    def run() -> None:
        server_background.serve(ModelRequest("a"), keep_alive_s, threading.Event(), first_s)
        ended.set()

    threading.Thread(target=run).start()
    return ended


def find() -> shared.SharedEngine:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if (engine := shared.find("a", None)) is not None:
            return engine
        time.sleep(0.01)
    raise AssertionError("no server")


def test_it_ends_when_it_is_idle(folder, monkeypatch):
    ended = serve(monkeypatch, 0.05)
    engine = find()
    assert engine.holding.load is None
    assert not ended.is_set()
    client = background_client(engine)
    client.close()
    assert ended.wait(10)
    assert not list(folder.glob("*.sock"))


def test_it_ends_where_nobody_came(folder, monkeypatch):
    assert serve(monkeypatch, None, first_s=0.05).wait(10)


def test_without_a_limit_it_stays_until_it_is_stopped(folder, monkeypatch):
    ended = serve(monkeypatch, None)
    engine = find()
    client = background_client(engine)
    client.close()
    assert not ended.wait(0.3)
    other = find()
    assert other.stop()
    other.close()
    assert ended.wait(10)


def background_client(engine: shared.SharedEngine) -> EngineClient:
    client = EngineClient(shared=engine)
    assert client.load(Load("path", LoadOptions("a"))).shared
    return client


def test_signals_end_it(environment):
    started = subprocess.Popen(
        [sys.executable, "-P", "-m", background.MODULE, environment["LOCALQ_MODEL"], ""],
        env={**environment, "PYTHONPATH": os.getcwd()}, stderr=subprocess.PIPE,
    )  # fmt: skip
    run = Path(environment["LOCALQ_CACHE"]) / "run" / f"{started.pid}.sock"
    end = time.monotonic() + 30
    while not run.exists() and time.monotonic() < end:
        time.sleep(0.02)
    started.send_signal(signal.SIGTERM)
    assert started.communicate(timeout=20)[1] == b""
    assert started.returncode == 0
    assert not run.exists()
