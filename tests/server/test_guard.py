"""Host, Origin, keys and content types: a table of raw requests, and every route without its key."""

from __future__ import annotations

import pytest

from localq.sanitize import Secret
from localq.server import app
from localq.server.guard import OPEN_PATHS, Access
from localq.server.service import Service
from tests.support.server.live_server import HELLO, KEY, LiveServer

BODY = b'{"messages":[{"role":"user","content":"Hello"}]}'
POST = "/v1/chat/completions"
# (status or statuses, request line or None for a POST of BODY, headers); {host} is the right one, {port} the port
TABLE = [
    (200, None, ["host: {host}"]),
    (200, None, ["host: localhost:{port}"]),
    (200, None, ["host: [::1]:{port}"]),
    (200, None, ["HOST: LOCALHOST:{port}"]),
    (200, "GET /health HTTP/1.1", ["host: {host}"]),
    (421, None, ["host: evil.com"]),
    (421, None, ["host: evil.com:{port}"]),
    (421, None, ["host: 127.0.0.1.evil.com:{port}"]),
    (421, None, ["host: localhost.evil.com:{port}"]),
    (421, None, ["host: evil.com.:{port}"]),
    (421, None, ["host: localhost.:{port}"]),
    (421, None, ["host: 127.0.0.1"]),
    (421, None, ["host: 127.0.0.1:1"]),
    (421, None, ["host: 127.0.0.1:{port}0"]),
    (421, None, ["host: 127.0.0.1:+{port}"]),
    (421, None, ["host: 127.0.0.1: {port}"]),
    (421, None, ["host: 127.1:{port}"]),
    (421, None, ["host: 2130706433:{port}"]),
    (421, None, ["host: 0x7f.1:{port}"]),
    (421, None, ["host: 0.0.0.0:{port}"]),
    (421, None, ["host: 192.168.0.1:{port}"]),
    (421, None, ["host: ::1:{port}"]),
    (421, None, ["host: [::ffff:127.0.0.1]:{port}"]),
    (421, None, ["host: [::1"]),
    (421, None, ["host: user@127.0.0.1:{port}"]),
    (421, None, ["host: 127.0.0.1:{port}@evil.com"]),
    (421, None, ["host: 127.0.0.1:{port}, evil.com"]),
    (421, None, ["host:"]),
    (400, None, []),
    (400, None, ["host: {host}", "host: evil.com"]),
    (400, None, ["host: {host}", "host: {host}"]),
    (421, "GET /health HTTP/1.1", ["host: evil.com"]),
    (421, "GET /v1/models HTTP/1.1", ["host: evil.com:{port}"]),
    (421, "GET http://evil.com/health HTTP/1.1", ["host: {host}"]),
    (421, "GET http://127.0.0.1:{port}/health HTTP/1.1", ["host: {host}"]),
    (421, "OPTIONS * HTTP/1.1", ["host: {host}"]),
    (421, "CONNECT 127.0.0.1:22 HTTP/1.1", ["host: {host}"]),
    (403, None, ["host: {host}", "origin: http://evil.com"]),
    (403, None, ["host: {host}", "origin: null"]),
    (403, None, ["host: {host}", "origin: http://127.0.0.1.evil.com:{port}"]),
    (403, None, ["host: {host}", "origin: http://localhost"]),
    (403, None, ["host: {host}", "origin: https://localhost:{port}"]),
    (403, None, ["host: {host}", "origin: http://good.example.evil.com"]),
    (403, None, ["host: {host}", "origin: http://good.example", "origin: http://evil.com"]),
    (403, None, ["host: {host}", "origin: file://"]),
    (403, None, ["host: {host}", "sec-fetch-site: cross-site"]),
    (403, "GET /v1/models HTTP/1.1", ["host: {host}", "sec-fetch-site: same-site"]),
    (403, "GET /health HTTP/1.1", ["host: {host}", "origin: http://evil.com"]),
    (403, "OPTIONS /v1/chat/completions HTTP/1.1",
     ["host: {host}", "origin: http://evil.com", "access-control-request-method: POST"]),
    (200, None, ["host: {host}", "origin: http://good.example"]),
    (200, None, ["host: {host}", "origin: http://localhost:{port}"]),
    (204, "OPTIONS /v1/chat/completions HTTP/1.1",
     ["host: {host}", "origin: http://good.example", "access-control-request-method: POST"]),
    (415, None, ["host: {host}", "content-type: text/plain"]),
    (415, None, ["host: {host}", "content-type: application/x-www-form-urlencoded"]),
    (415, None, ["host: {host}", "content-type: multipart/form-data; boundary=x"]),
    (415, None, ["host: {host}", "content-type: text/json"]),
    (415, None, ["host: {host}", "content-type:"]),
    (415, None, ["host: {host}", "content-encoding: gzip"]),
    (415, None, ["host: {host}", "content-encoding: br"]),
    (200, None, ["host: {host}", "content-type: application/json; charset=utf-8"]),
    (405, "GET /v1/chat/completions HTTP/1.1", ["host: {host}"]),
    (405, "DELETE /v1/models HTTP/1.1", ["host: {host}"]),
    (404, "GET /v1/../etc/passwd HTTP/1.1", ["host: {host}"]),
    (404, "GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1", ["host: {host}"]),
    (404, "GET /v1/models/%2Fetc%2Fpasswd HTTP/1.1", ["host: {host}"]),
    (404, "GET /docs HTTP/1.1", ["host: {host}"]),
    ((400, 404), "GET /\x00 HTTP/1.1", ["host: {host}"]),
    (400, "GET /health", ["host: {host}"]),
    (400, "hello", []),
    ((400, 421), "PRI * HTTP/2.0", []),
]  # fmt: skip


def raw(line: str | None, headers: list[str], port: int) -> bytes:
    places = {"host": f"127.0.0.1:{port}", "port": port}
    given = [each.format(**places) for each in headers]
    if line is None:
        line = f"POST {POST} HTTP/1.1"
        if not any(each.lower().startswith("content-type") for each in given):
            given.append("content-type: application/json")
        given.append(f"content-length: {len(BODY)}")
    head = "\r\n".join([line.replace("{port}", str(port)), *given, "connection: close", "", ""])
    return head.encode("latin-1") + (BODY if line.startswith("POST") else b"")


@pytest.mark.parametrize(("status", "line", "headers"), TABLE)
def test_a_raw_request_is_answered_with_its_status(
    server: LiveServer, status: int | tuple[int, ...], line: str | None, headers: list[str]
) -> None:
    response = server.raw(raw(line, headers, server.port))
    assert response.startswith(b"HTTP/1.1 ")
    found = int(response.split()[1])
    assert found in (status if isinstance(status, tuple) else (status,))
    allowed = [each for each in response.lower().split(b"\r\n") if each.startswith(b"access-control-allow-origin")]
    welcome = ("origin: http://good.example", f"origin: http://localhost:{server.port}")
    named = [each.format(host="", port=server.port) for each in headers if each.startswith("origin")]
    assert bool(allowed) == (found < 300 and any(each in welcome for each in named))
    assert b"passwd" not in response.partition(b"\r\n\r\n")[2]


def test_refusals_do_no_work(server: LiveServer) -> None:
    before = server.slot.state()
    server.say("Hello.", prefill_s=30)
    server.raw(raw(None, ["host: evil.com"], server.port))
    assert server.slot.state().busy is before.busy is False


WRONG_KEYS = [
    {},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": f"Basic {KEY}"},
    {"authorization": KEY},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY.upper()}"},
    {"authorization": "Bearer \xff"},
    {"x-api-key": KEY[:-1]},
    {"cookie": f"key={KEY}"},
]


@pytest.mark.parametrize("headers", WRONG_KEYS)
def test_a_wrong_key_is_refused(locked_server: LiveServer, headers: dict[str, str]) -> None:
    lines = ["host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    response = locked_server.raw(raw(None, lines, locked_server.port))
    assert response.startswith(b"HTTP/1.1 401")
    assert b"www-authenticate: Bearer" in response
    assert KEY.encode() not in response


def test_a_key_in_the_query_is_no_key(locked_server: LiveServer) -> None:
    line = f"GET /v1/models?key={KEY}&api_key={KEY} HTTP/1.1"
    assert locked_server.raw(raw(line, ["host: {host}"], locked_server.port)).startswith(b"HTTP/1.1 401")


def test_the_key_is_taken_from_both_headers(locked_server: LiveServer) -> None:
    locked_server.say()
    for line in (f"authorization: bearer {KEY}", f"x-api-key: {KEY}"):
        response = locked_server.raw(raw(None, ["host: {host}", line], locked_server.port))
        assert response.startswith(b"HTTP/1.1 200")


def test_every_route_but_health_needs_the_key(locked_server: LiveServer) -> None:
    """A new route is in this list as soon as it is in the application."""
    service = Service(locked_server.slot, locked_server.names, locked_server.metrics)
    found = app.routes(service)
    assert len(found) >= 10
    for route in found:
        path = route.path.replace("{name:path}", "tiny")
        for method in sorted(route.methods or ()):
            response = locked_server.raw(raw(f"{method} {path} HTTP/1.1", ["host: {host}"], locked_server.port))
            expected = (b"200",) if route.path in OPEN_PATHS else (b"401",)
            assert response.split()[1] in expected, (method, path)
    assert OPEN_PATHS == ("/health",)
    unknown = locked_server.raw(raw("GET /nothing HTTP/1.1", ["host: {host}"], locked_server.port))
    assert unknown.startswith(b"HTTP/1.1 401")


def test_health_tells_nothing_about_the_model(locked_server: LiveServer) -> None:
    assert locked_server.get("/health").json.keys() == {"status", "version"}


def test_a_body_needs_the_key_on_every_path(locked_server: LiveServer) -> None:
    """Else anybody could use up what all bodies together may have."""
    found = locked_server.raw(
        raw("POST /health HTTP/1.1", ["host: {host}", f"content-length: {len(BODY)}"], locked_server.port)
    )
    assert found.startswith(b"HTTP/1.1 401")


def test_errors_have_the_shape_of_their_api(locked_server: LiveServer) -> None:
    refused = locked_server.post("/v1/messages", HELLO, authorization="Bearer wrong").json
    assert refused["type"] == "error"
    assert refused["error"]["type"] == "authentication_error"
    refused = locked_server.post(POST, HELLO, authorization="Bearer wrong").json
    assert refused["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("host", "known"),
    [("127.0.0.1:80", True), ("127.0.0.1", True), ("box:80", True), ("10.1.2.3:80", True), ("[fe80::1]:80", True),
     ("box:443", True), ("box", True), ("evil.com:80", False), ("10.1.2.3.evil.com:80", False),
     ("localhost:81", False)],
)  # fmt: skip
def test_a_server_on_all_addresses_knows_addresses_and_its_names(host: str, known: bool) -> None:
    access = Access(80, ("box",), any_address=True, key=Secret(KEY))
    assert access.knows_host(host) is known


@pytest.mark.parametrize(
    ("origin", "known"),
    [("http://box", True), ("http://box:80", True), ("http://box:3000", False), ("https://box", False),
     ("http://evil.com", False), ("null", False)],
)  # fmt: skip
def test_a_page_of_another_port_is_a_foreign_one(origin: str, known: bool) -> None:
    assert Access(80, ("box",), key=Secret(KEY)).knows_origin(origin, "box:80") is known


@pytest.mark.parametrize(
    ("origin", "known"),
    [("http://10.1.2.3:8000", True), ("http://6.6.6.6:8000", False), ("http://[fe80::1]:8000", False),
     ("http://localhost:8000", True), ("http://10.1.2.3", False)],
)  # fmt: skip
def test_a_page_of_another_address_is_a_foreign_one(origin: str, known: bool) -> None:
    """A server on all addresses does not know which are its own; a page of its own asks the address that it is from."""
    access = Access(8000, ("box",), any_address=True, key=Secret(KEY))
    assert access.knows_origin(origin, "10.1.2.3:8000") is known
