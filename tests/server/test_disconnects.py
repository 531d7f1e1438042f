"""Clients that go away, a queue that is full, an engine that dies, and the end of the server."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localq.server import serve as serving
from localq.server.names import ListedModel
from tests.support.server.live_server import HELLO, Answer, LiveServer, read_response

LIMIT_S = 0.25


def until(holds: Callable[[], bool], seconds: float = 5.0) -> float:
    """Wait; how long it took."""
    begun = time.monotonic()
    while not holds() and time.monotonic() - begun < seconds:
        time.sleep(0.002)
    assert holds()
    return time.monotonic() - begun


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def threads() -> set[str]:
    """Names of threads, without those of asyncio's pool, which is bounded."""
    return {each.name for each in threading.enumerate() if not each.name.startswith("asyncio_")}


SLOW = {"text": "word ", "repeat": 0, "step_s": 0.01}
MOMENTS = {
    "prefill": {"prefill_s": 30.0},
    "stream": SLOW,
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("close", [reset, socket.socket.close])
def test_a_client_that_is_gone_ends_its_reply(
    server: LiveServer, moment: str, stream: bool, close: Callable[[socket.socket], None]
) -> None:
    server.say(**MOMENTS[moment])
    connection = server.connect({**HELLO, "stream": stream})
    until(lambda: server.slot.state().busy)
    if stream and moment == "stream":
        assert connection.recv(100)
    close(connection)
    assert until(lambda: not server.slot.state().busy) < LIMIT_S
    server.say()
    assert server.chat().status == 200


def test_a_client_that_is_gone_while_its_count_waits_leaves_the_queue(own_server: LiveServer) -> None:
    """Tokens are counted in turn where the model is not open."""
    own_server.names.switch = True
    own_server.names._listed = (time.monotonic() + 100, [ListedModel("other", 0)])
    own_server.say(**SLOW)
    own_server.connect()
    until(lambda: own_server.slot.state().busy)
    waiting = own_server.connect({**HELLO, "model": "other"}, "/v1/messages/count_tokens")
    until(lambda: own_server.slot.state().queued == 1)
    reset(waiting)
    assert until(lambda: own_server.slot.state().queued == 0) < LIMIT_S
    assert own_server.slot.state().busy


@pytest.mark.parametrize("ahead", [b"\r\n", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\n\r\n", b"x" * 2**19])
def test_a_client_that_sends_ahead_and_is_gone_ends_its_reply(server: LiveServer, ahead: bytes) -> None:
    """The last one is cut, because it sends more than is read ahead."""
    server.say(**SLOW)
    connection = server.connect(HELLO)
    until(lambda: server.slot.state().busy)
    connection.sendall(ahead)
    if len(ahead) < 1000:
        connection.close()
    assert until(lambda: not server.slot.state().busy) < LIMIT_S
    server.say()
    assert server.chat().status == 200


def test_requests_that_are_sent_ahead_are_answered_in_turn(server: LiveServer) -> None:
    with server.connect(HELLO) as connection:
        connection.sendall(
            f"GET /health HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\nconnection: close\r\n\r\n".encode()
        )
        found = b""
        while part := connection.recv(65536):
            found += part
    assert found.count(b"HTTP/1.1 200") == 2
    assert found.index(b"Hello.") < found.index(b'"status"')


def test_a_client_that_is_gone_while_it_waits_leaves_the_queue(server: LiveServer) -> None:
    server.say(**SLOW)
    first = server.connect()
    until(lambda: server.slot.state().busy)
    waiting = [server.connect() for _ in range(3)]
    until(lambda: server.slot.state().queued == 3)
    for each in waiting:
        reset(each)
    assert until(lambda: server.slot.state().queued == 0) < LIMIT_S
    assert server.slot.state().busy
    first.close()
    until(lambda: not server.slot.state().busy)


def test_disconnects_leave_nothing_behind(server: LiveServer) -> None:
    """100 of the campaign's 10,000 (`tests.tools.serve_campaign`)."""
    server.chat()
    server.say(**SLOW)
    before = threads(), len(os.listdir("/proc/self/fd"))
    for number in range(100):
        connection = server.connect({**HELLO, "stream": bool(number % 3)})
        if number % 2:
            connection.settimeout(5)
            until(lambda: server.slot.state().busy)
        reset(connection) if number % 5 else connection.close()
    until(lambda: not (server.slot.state().busy or server.slot.state().queued))
    until(lambda: not server.server.server_state.tasks)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before[1])
    assert threads() <= before[0]
    server.say()
    assert server.chat().json["choices"][0]["message"]["content"] == "Hello."


@pytest.fixture
def own_server(model_folder: Path, tmp_path: Path) -> Iterator[LiveServer]:
    """A server of this test alone, with a short queue."""
    made = LiveServer(model_folder, tmp_path, limit=4)
    yield made
    made.close()


def test_beyond_the_queue_requests_are_refused_with_a_time(own_server: LiveServer) -> None:
    own_server.say("Hello.", step_s=0.02)
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        found: list[Answer] = list(pool.map(lambda _: own_server.chat(max_tokens=4), range(200)))
    refused = [each for each in found if each.status == 503]
    assert {each.status for each in found} == {200, 503}
    assert 100 <= len(refused) <= 200 - 4
    assert all(each.headers["retry-after"] == "5" and each.json["error"]["code"] == "overloaded" for each in refused)
    assert own_server.chat(max_tokens=1).status == 200


def test_where_the_engine_dies_every_open_request_gets_an_error(own_server: LiveServer) -> None:
    own_server.say(**SLOW)
    stream = own_server.connect()
    until(lambda: own_server.slot.state().busy)
    waiting = [own_server.connect({**HELLO, "stream": number % 2 == 0}) for number in range(3)]
    until(lambda: own_server.slot.state().queued == 3)
    pid = own_server.slot.state().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    for each in waiting:
        each.settimeout(5)
        response = read_response(each)
        assert response.startswith(b"HTTP/1.1 500")
        assert b"stopped unexpectedly" in response
    whole = b""
    stream.settimeout(5)
    while part := stream.recv(65536):
        whole += part
        if b"stopped unexpectedly" in whole:
            break
    assert b"[DONE]" not in whole
    assert time.monotonic() - begun < 2
    own_server.say()
    assert own_server.chat().status == 200  # one restart a minute


def test_an_engine_that_dies_again_is_not_restarted_within_a_minute(own_server: LiveServer) -> None:
    for expected in (200, 500):
        pid = own_server.slot.state().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: own_server.slot.state().loaded is None)
        answer = own_server.chat()
        assert answer.status == expected
    assert "failed again within 60 s" in answer.json["error"]["message"]


def test_at_the_end_a_running_reply_is_finished_and_new_ones_are_refused(model_folder: Path, tmp_path: Path) -> None:
    server = LiveServer(model_folder, tmp_path)
    server.say("Hello there.", step_s=0.03)
    stream = server.connect()
    until(lambda: server.slot.state().busy)
    waiting = server.connect({**HELLO, "stream": False})
    until(lambda: server.slot.state().queued == 1)
    server.server.should_exit = True
    assert b"HTTP/1.1 503" in read_response(waiting)
    stream.settimeout(5)
    whole = b""
    while part := stream.recv(65536):
        whole += part
    assert b"data: [DONE]" in whole
    with pytest.raises(ConnectionRefusedError):
        server.chat()
    server.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_at_the_end_a_long_reply_is_ended_with_an_error_event(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(serving, "DRAIN_S", 0.1)
    server = LiveServer(model_folder, tmp_path)
    server.say(**SLOW)
    body = {"stream": True, **({"input": "Hello"} if path.endswith("responses") else HELLO)}
    stream = server.connect(body | ({"max_tokens": 1000} if path.endswith("messages") else {}), path)
    until(lambda: server.slot.state().busy)
    begun = time.monotonic()
    server.server.should_exit = True
    stream.settimeout(5)
    whole = b""
    while part := stream.recv(65536):
        whole += part
    frames = [each for each in whole.split(b"\n") if each.startswith(b"data: {")]
    assert b"server: shutting down" in frames[-1]
    json.loads(frames[-1].removeprefix(b"data: "))
    server.close()
    assert time.monotonic() - begun < 3


def test_a_stream_in_which_nothing_is_said_says_so(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localq.server.responses.PING_S", 0.05)
    server.say("Hi", prefill_s=0.3)
    assert b": ping\n\n" in server.chat(stream=True).body
    answer = server.post("/v1/messages", {**HELLO, "max_tokens": 9, "stream": True})
    assert {"type": "ping"} in answer.events


def test_the_loop_is_free_while_a_reply_is_made(server: LiveServer) -> None:
    server.say(**SLOW)
    stream = server.connect()
    until(lambda: server.slot.state().busy)
    begun = time.monotonic()
    assert server.get("/health").status == 200
    assert server.get("/v1/models").status == 200
    assert server.get("/metrics").status == 200
    assert time.monotonic() - begun < 1
    stream.close()
    until(lambda: not server.slot.state().busy)
