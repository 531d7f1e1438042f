"""Sizes and times: bodies, headers, connections, JSON; others are served meanwhile."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path

import psutil
import pytest

from localq.server import guard, json_body, protocol, responses
from localq.text import template
from tests.support.server.live_server import HELLO, LiveServer, read_response

MIB = 2**20
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"


def status(response: bytes) -> int:
    return int(response.split()[1])


def head(server: LiveServer, *lines: str) -> bytes:
    return (HEAD.format(port=server.port) + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode()


@pytest.mark.parametrize("length", [10 * 2**30, json_body.MAX_BYTES + 1, 10**17])
def test_a_body_that_says_it_is_too_large_is_not_read(server: LiveServer, length: int) -> None:
    assert status(server.raw(head(server, f"content-length: {length}"))) == 413


def test_the_limit_of_a_body_is_exact(server: LiveServer) -> None:
    for extra, expected in ((0, 400), (1, 413)):
        spaces = json_body.MAX_BYTES + extra - 2
        assert server.post("/v1/chat/completions", b"{" + b" " * spaces + b"}").status == expected


def test_a_chunked_body_without_end_is_cut_at_the_limit(server: LiveServer) -> None:
    before = psutil.Process().memory_info().rss
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head(server, "transfer-encoding: chunked"))
        sent = 0
        try:
            while sent < 64 * MIB:
                connection.sendall(chunk)
                sent += len(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 48 * MIB
        assert read_response(connection)[:12] in (b"HTTP/1.1 413", b"")  # reset: more was sent than is read
    assert psutil.Process().memory_info().rss - before < 64 * MIB


def test_many_large_bodies_at_a_time_are_refused(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODIES_BYTES", 3 * MIB)
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(4)]
    try:
        for each in connections:
            each.sendall(head(server, f"content-length: {2 * MIB}") + b" " * MIB)
        for each in connections:
            each.settimeout(0.2)
        found = []
        for each in connections:
            try:
                found.append(each.recv(12))
            except TimeoutError:
                found.append(b"")
        assert found.count(b"HTTP/1.1 503") in (1, 2)
    finally:
        for each in connections:
            each.close()
    assert server.chat().status == 200


@pytest.mark.parametrize(("line", "expected"), [("POST /v1/completions HTTP/1.1", 415), ("GET /health HTTP/1.1", 200)])
def test_a_body_that_nobody_wants_is_not_taken_to_its_end(server: LiveServer, line: str, expected: int) -> None:
    sent, given = 0, f"{line}\r\nhost: 127.0.0.1:{server.port}\r\ncontent-length: 10000000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(given.encode())
        assert status(connection.recv(65536)) == expected
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 256 * MIB:
                connection.sendall(b"x" * MIB)
                sent += MIB
    assert sent < 48 * MIB


def test_a_malformed_body_is_answered(server: LiveServer) -> None:
    chunked = head(server, "transfer-encoding: chunked")
    assert status(server.raw(chunked + b"-5\r\nhello")) == 400
    assert status(server.raw(chunked + b"5;" + b"x" * (guard.MAX_HEADER_BYTES + 1))) == 431


def test_bodies_of_requests_that_run_count(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODIES_BYTES", 3 * MIB)
    server.say("word ", repeat=0, step_s=0.01)
    body = json.dumps(HELLO).encode()[:-1] + b" " * 2 * MIB + b"}"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(head(server, f"content-length: {len(body)}") + body)
    deadline = time.monotonic() + 10
    while not server.slot.state().busy and time.monotonic() < deadline:
        time.sleep(0.005)
    assert server.post("/v1/chat/completions", body).status == 503
    connection.close()
    server.say()
    while server.slot.state().busy and time.monotonic() < deadline:
        time.sleep(0.005)
    assert server.post("/v1/chat/completions", body).status == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/chat/completions", "messages"), ("/v1/completions", "prompt"), ("/v1/responses", "input"),
     ("/v1/messages", "messages")],
)  # fmt: skip
def test_a_text_that_no_template_takes_does_not_wait(server: LiveServer, path: str, field: str) -> None:
    server.say("word ", repeat=0, step_s=0.01)
    server.connect()
    text = "1" * (template.MAX_CONVERSATION_BYTES + 1)
    given = [{"role": "user", "content": text}] if field == "messages" else text
    answer = server.post(path, {field: given, "max_tokens": 1})
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith(f"{field}: the text is too long")


def test_headers_have_limits_of_size_and_number(server: LiveServer) -> None:
    assert status(server.raw(head(server, "x: " + "y" * MIB))) == 431
    assert status(server.raw(head(server, "x: " + "y" * (guard.MAX_HEADER_BYTES + 1)))) == 431
    assert status(server.raw(head(server, *(f"x{number}: y" for number in range(10_000))))) == 431
    assert status(server.raw(head(server, *(f"x{number}: y" for number in range(guard.MAX_HEADERS))))) == 431
    path = f"GET /{'x' * 3000} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\n\r\n"
    assert status(server.raw(path.encode())) == 414


def test_slow_headers_and_bodies_are_ended_while_others_are_served(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEADER_S", 0.3)
    monkeypatch.setattr(server.app._app, "_body_s", 0.3)
    beginnings = [b"", b"GET /hea", head(server)[:-2], head(server, "content-length: 20") + b'{"m']
    begun = time.monotonic()
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in beginnings]
    for each, first in zip(connections, beginnings, strict=True):
        each.sendall(first)
    assert server.chat().status == 200
    for each in connections:
        assert status(read_response(each)) == 408
        each.close()
    assert time.monotonic() - begun < 3


def test_connections_have_a_limit(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 3)
    with socket.create_connection(("127.0.0.1", server.port)), socket.create_connection(("127.0.0.1", server.port)):
        last = server.chat().status
        many = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(4)]
        assert b"HTTP/1.1 503" in [each.recv(12) for each in many[-1:]]
        for each in many:
            each.close()
    assert last in (200, 503)


DEEP = json_body.MAX_DEPTH


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'"x"', "not a JSON object"),
        (b"{", "JSON"),
        (b'{"a": 1,}', "JSON"),
        (b"{'a': 1}", "JSON"),
        (b'{"a": 1} {"b": 2}', "JSON"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b'{"messages": [{"role": "user", "role": "system", "content": ""}]}', "appears twice"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": Infinity}', "Infinity"),
        (b'{"temperature": -Infinity}', "Infinity"),
        (b'{"temperature": 1e999}', "too large"),
        (b'{"temperature": ' + b"9" * 500 + b"}", "too large"),
        (b'{"temperature": 0.' + b"9" * 500 + b"}", "too large"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\x00"}', "JSON"),
        (b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}", "nested"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b'{"a": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", "nested"),
        (b'{"a": [' + b"[]," * 300_000 + b"[]]}", "values"),
        (b"\xef\xbb\xbf{}", "JSON"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
    ],
)
def test_json_is_read_strictly(server: LiveServer, body: bytes, says: str) -> None:
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 400
    assert says in answer.json["error"]["message"]


def test_depth_below_the_limit_is_read(server: LiveServer) -> None:
    body = json.dumps(HELLO)[:-1] + ', "metadata": {"a": ' + "[" * (DEEP - 3) + "]" * (DEEP - 3) + "}}"
    assert server.post("/v1/chat/completions", body.encode()).status == 200


@pytest.mark.parametrize("count", [*range(3, 12), 100])
def test_a_client_that_reads_no_response_is_dropped(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """It asks for more than the buffers hold, or for so much that the rest waits for the end of the connection."""
    monkeypatch.setattr(responses, "WRITE_S", 0.1)
    open_ones = server.server.server_state.connections
    before = len(open_ones)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        line = f"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\n"
        connection.sendall(f"{line}\r\n".encode() * (count - 1) + f"{line}connection: close\r\n\r\n".encode())
        assert connection.recv(1)
        deadline = time.monotonic() + 5
        while len(open_ones) > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(open_ones) <= before


def test_a_reader_that_does_not_read_is_dropped_and_others_are_served(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "WRITE_S", 0.5)
    server.say("x" * 4000, repeat=0, step=4000, step_s=0.0005)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    raw = json.dumps({**HELLO, "stream": True, "logprobs": False}).encode()
    connection.sendall(head(server, f"content-length: {len(raw)}") + raw)
    deadline = time.monotonic() + 10
    while not server.slot.state().busy and time.monotonic() < deadline:
        time.sleep(0.005)
    while server.slot.state().busy and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not server.slot.state().busy
    server.say()
    assert server.chat().status == 200
    connection.close()


FILES = [
    {"messages": [{"role": "user", "content": "@/etc/passwd"}]},
    {"messages": [{"role": "user", "content": "see @{path}"}]},
]
REFUSED = [
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file://{path}"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "input_file", "file_id": "{path}"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "file", "file": {"path": "{path}"}}]}]},
    {**HELLO, "model": "{path}"},
    {**HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "@{path}"}}},
    {**HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "file://{path}"}}}},
]


@pytest.mark.parametrize("body", [*FILES, *REFUSED])
def test_no_file_of_this_machine_is_read(server: LiveServer, tmp_path: Path, body: dict[str, object]) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("THE SECRET")
    answer = server.post("/v1/chat/completions", json.loads(json.dumps(body).replace("{path}", str(secret))))
    assert b"THE SECRET" not in answer.body
    assert answer.status == (200 if body in FILES else 404 if "model" in body else 400)
