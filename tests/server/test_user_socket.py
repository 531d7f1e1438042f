"""The socket of a server: who may connect, an engine shared with a front end, turns, cancel, `ps` and `stop`."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from localq import places
from localq.errors import ExitCode, LocalqError
from localq.planner.load_options import LoadOptions
from localq.server.model import ModelRequest, OpenModel
from localq.server.slot import Slot
from localq.server.ticket import Ticket
from localq.server.user_socket import MOST_CONNECTIONS, UserSocket
from localq.worker import messages, shared
from localq.worker.client import SERVER, EngineClient
from localq.worker.messages import (
    Done,
    Generate,
    Load,
    Loading,
    Profile,
    Tokens,
)
from tests.support.server.scripted_model import DEAD, Models, QuietWatcher

SCRIPTED = (sys.executable, "-m", "tests.support.worker.scripted_engine")
MODEL = ModelRequest("a")
LOAD = Load("path", LoadOptions("a"))


class Served:
    """A server with model `a` loaded, without HTTP."""

    def __init__(self) -> None:
        self.models, self.stopped = Models(), threading.Event()
        self.slot = Slot(QuietWatcher(), opener=self.models)
        self.slot.open(MODEL, QuietWatcher())
        self.socket = UserSocket(self.slot, MODEL, self.stop, "http://127.0.0.1:8000")

    def stop(self) -> None:
        self.stopped.set()
        threading.Thread(target=self.socket.close).start()

    def close(self) -> None:
        self.socket.close()
        self.slot.close(0.0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / ("deep" * 30) / "run"  # longer than an address of a socket may be
    monkeypatch.setenv("LOCALQ_RUNTIME", str(place))
    return place


@pytest.fixture
def served(folder) -> Iterator[Served]:
    made = Served()
    made.socket.open()
    yield made
    made.close()


@pytest.fixture
def client(served) -> Iterator[EngineClient]:
    made = EngineClient(shared=shared.find("a", None))
    yield made
    made.close()


def texts(client: EngineClient, id: int = 1, count: int = 3) -> list[int]:
    events = list(client.generate(Generate(id, [1, 2], max_tokens=count)))
    assert isinstance(events[-1], Done)
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def test_a_front_end_uses_the_engine_of_the_server(served, client):
    loaded = client.load(LOAD)
    assert (loaded.name, loaded.shared, client.is_shared, client.alive) == ("a", True, True, True)
    assert texts(client) == [0, 1, 2]
    assert texts(client, 2) == [0, 1, 2]
    client.close()
    assert not client.alive
    assert served.models.log == ["load a"]  # the server still has it
    assert served.slot.state().loaded is not None


def test_the_folder_is_for_this_user_only(folder, served):
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o750)
    assert shared.sockets() == []
    assert shared.find("a", None) is None
    with pytest.raises(LocalqError, match="other users can open this folder") as caught:
        UserSocket(served.slot, MODEL, served.stop).open()
    assert caught.value.exit_code == ExitCode.DISK


def test_nobody_else_is_answered(served, monkeypatch):
    monkeypatch.setattr(shared, "is_own", lambda connection: False)
    assert list(shared.servers()) == []


def test_names_select_a_server(served):
    for name, format, is_meant in (
        ("a", None, True), ("A ", None, True), ("b", None, False), ("a", "vq2", False), ("a@vq2", None, False),
    ):  # fmt: skip
        engine = shared.find(name, format)
        assert (engine is not None) == is_meant, name
        if engine is not None:
            engine.close()


def test_a_leftover_socket_is_removed(folder, served):
    left = shared.socket_path(folder, 99_999_999)
    with socket.socket(socket.AF_UNIX) as listening:
        shared.at_short_path(left, listening.bind)
    assert [each.holding.model for each in shared.servers()] == ["a"]
    assert not left.exists()
    served.close()
    assert list(folder.iterdir()) == []


def test_a_front_end_that_looks_while_the_socket_is_made_removes_nothing(folder, monkeypatch):
    made, plain = Served(), shared.at_short_path

    def slowly(path, call):
        plain(path, call)
        if call.__name__ == "bind":
            assert list(shared.servers()) == []  # bound, but nobody listens so far

    monkeypatch.setattr(shared, "at_short_path", slowly)
    try:
        path = made.socket.open()
        assert [each.holding.model for each in shared.servers()] == ["a"]
        assert [each.name for each in folder.iterdir()] == [path.name]
    finally:
        made.close()


def test_progress_of_a_load_waits_for_no_front_end(served):
    """Such as one that was stopped with Ctrl-Z: it reads nothing."""
    engine = shared.find("a", None)
    (connection,) = served.socket._connections
    connection._tickets[None] = Ticket("x", MODEL, lambda opened: iter(()))  # a load that has not been answered
    try:
        thread = threading.Thread(
            target=lambda: [served.socket.show_loading(Loading("weights", n, 2000)) for n in range(2000)], daemon=True
        )
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
        first = messages.decode(engine.stream.readline())
        assert first == Loading("weights", 0, 2000)
    finally:
        engine.close()


def test_another_load_gets_a_process_of_its_own(served, folder):
    with EngineClient(SCRIPTED, shared=shared.find("a", None)) as client:
        loaded = client.load(Load("path", LoadOptions("a", ctx=77)))
        assert not loaded.shared
        assert not client.is_shared
        assert client.pid != os.getpid()


def test_a_server_that_has_switched_since_is_left(served):
    with EngineClient(SCRIPTED, shared=shared.find("a", None)) as client:
        served.slot.submit("other", ModelRequest("b"), lambda opened: iter(())).cancel()
        switched = served.slot.submit("other", ModelRequest("b"), lambda opened: iter([opened.name]))
        assert list(switched) == ["b"]
        assert not client.load(LOAD).shared


def test_cancel_and_a_closed_reply_stop_the_engine(served, client):
    client.load(LOAD)
    engine = served.models.clients[-1]
    engine.gate.clear()
    engine.begun.clear()
    reply = client.generate(Generate(5, [1], max_tokens=100))
    thread = threading.Thread(target=lambda: engine.begun.wait(5) and client.cancel(5))
    thread.start()
    assert [event.reason for event in reply if isinstance(event, Done)] == ["cancelled"]
    thread.join()
    engine.gate.set()
    assert texts(client, 6) == [0, 1, 2]


def test_a_front_end_that_goes_frees_the_engine(served, client):
    client.load(LOAD)
    engine = served.models.clients[-1]
    engine.gate.clear()
    engine.begun.clear()
    threading.Thread(target=lambda: list(_suppressed(client)), daemon=True).start()
    assert engine.begun.wait(5)
    client.close()
    other = EngineClient(shared=shared.find("a", None))
    other.load(LOAD)
    assert texts(other) == [0, 1, 2]
    other.close()


def _suppressed(client: EngineClient) -> Iterator[object]:
    try:
        yield from client.generate(Generate(9, [1], max_tokens=1000))
    except LocalqError as error:
        yield error


def test_front_ends_take_turns(served, client):
    client.load(LOAD)
    engine = served.models.clients[-1]
    engine.gate.clear()
    engine.begun.clear()
    threading.Thread(target=lambda: list(client.generate(Generate(1, [1], max_tokens=4))), daemon=True).start()
    assert engine.begun.wait(5)
    others = [EngineClient(shared=shared.find("a", None)) for _ in range(3)]
    found: dict[int, list[int]] = {}

    def ask(number: int, each: EngineClient) -> None:
        each.load(LOAD)
        found[number] = texts(each, number)

    threads = [threading.Thread(target=ask, args=[number, each]) for number, each in enumerate(others)]
    for thread in threads:
        thread.start()
    engine.gate.set()
    for thread in threads:
        thread.join(10)
    assert found == {number: [0, 1, 2] for number in range(3)}
    for each in others:
        each.close()


def test_a_dead_engine_is_told_and_the_next_message_goes_on(served, client):
    client.load(LOAD)
    served.models.clients[-1].die_at = 1
    with pytest.raises(LocalqError) as caught:
        texts(client)
    assert str(caught.value) == str(DEAD)
    served.models.clients[-1].die_at = None
    assert client.alive
    assert texts(client, 2) == [0, 1, 2]


def test_a_server_that_ends_is_told(served, client):
    client.load(LOAD)
    served.socket.close()
    with pytest.raises(LocalqError) as caught:
        texts(client)
    assert caught.value.what == SERVER
    assert not client.is_shared


def test_what_an_engine_of_one_front_end_can_do_alone_is_refused(served, client):
    client.load(LOAD)
    for call in (lambda: client.save_cache("x"), lambda: client.restore_cache("x"), lambda: client.profile(Profile())):
        with pytest.raises(LocalqError, match="not available with the `localq serve` engine"):
            call()


def test_no_reply_before_a_load_and_no_line_that_is_not_a_message(served):
    engine = shared.find("a", None)
    assert engine is not None
    engine.connection.sendall(b'{"type":"generate","id":1,"prompt":[1]}\n')
    assert b"no model is loaded" in engine.stream.readline()
    engine.connection.sendall(b"GET / HTTP/1.1\n")
    assert engine.stream.readline() == b""
    engine.close()
    assert texts_of_new_client(served) == [0, 1, 2]


def test_a_message_with_a_field_of_another_kind_ends_the_connection(served, monkeypatch):
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    engine = shared.find("a", None)
    engine.connection.sendall(b'{"type":"cancel","id":[]}\n')
    assert engine.stream.readline() == b""
    engine.close()
    assert texts_of_new_client(served) == [0, 1, 2]
    assert failed == []


def texts_of_new_client(served: Served) -> list[int]:
    client = EngineClient(shared=shared.find("a", None))
    client.load(LOAD)
    try:
        return texts(client)
    finally:
        client.close()


def test_connections_have_a_limit_and_leave_nothing(served):
    held = []
    for _ in range(MOST_CONNECTIONS):
        engine = shared.find("a", None)
        assert engine is not None
        held.append(engine)
    assert shared.find("a", None) is None
    for each in held:
        each.close()
    end = threading.Event()
    for _ in range(500):
        if not served.socket._connections:
            break
        end.wait(0.01)
    assert texts_of_new_client(served) == [0, 1, 2]


def test_status_and_stop(served):
    for engine in shared.servers():
        found = engine.status()
        assert (found.pid, found.model, found.url) == (os.getpid(), "a", "http://127.0.0.1:8000")
        assert (found.loaded, found.format, found.device, found.context_size) == (True, "bf16", "cpu", 1000)
        assert (found.busy, found.loading, found.queued, found.unloads_at) == (False, False, 0, None)
        assert time.time() - 60 < found.started <= time.time()
        assert engine.stop()
    assert engine.connection.fileno() == -1  # closed with the walk
    assert served.stopped.is_set()
    assert list(places.runtime_dir().iterdir()) == []


def test_a_reply_that_waits_is_cancelled_there(served, client):
    client.load(LOAD)
    engine = served.models.clients[-1]
    engine.gate.clear()
    engine.begun.clear()

    def slow(opened: OpenModel) -> Iterator[object]:
        yield from opened.client.generate(Generate(1, [1], max_tokens=50))

    running = served.slot.submit("http", MODEL, slow)
    assert engine.begun.wait(5)
    reply = client.generate(Generate(3, [1]))
    thread = threading.Timer(0.1, lambda: client.cancel(3))
    thread.start()
    assert [event.reason for event in reply if isinstance(event, Done)] == ["cancelled"]
    running.cancel()
