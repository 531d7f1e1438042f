"""`Guard`: what every request passes before any work: Host, Origin, key, headers and the body.

Host       one, and a name of this server with its port: a page cannot reach it by a name that it has rebound (421)
Origin     absent, this server's own, or named by the user: a page of another site gets nothing (403)
key        of every route but /health, where there is a key: `Authorization: Bearer` or `x-api-key` (401)
body       of POST: JSON only (415), with limits of size (413) and time (408), and of all requests together (503)
headers    with limits of size and number (431)
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from localq.sanitize import Secret
from localq.server import json_body
from localq.server.api_error import ApiError
from localq.server.responses import error_response

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_HEADERS, MAX_HEADER_BYTES = 100, 32 * 1024
MAX_PATH = 2048  # bytes
BODY_S = 30.0  # for a body to come
BODIES_BYTES = 10 * 2**20  # of all requests together until they are answered; text takes up to four times that
DISCARD_BYTES, DISCARD_S = 8 * 2**20, 0.5
OPEN_PATHS = ("/health",)
_NO_BODY = ("GET", "HEAD", "OPTIONS", "DELETE")
_ALLOWED_HEADERS = "authorization, content-type, x-api-key, anthropic-version, anthropic-beta"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Access:
    """Access rules of the server.

    hosts    names in Host that the user has given, with any port: a proxy may have another
    port     in Host, behind the loopback's names, and behind every IP address with `any_address` (a server on all)
    origins  of pages that may use it, as browsers write them
    key      None: no key is asked for
    """

    port: int
    hosts: tuple[str, ...] = ()
    any_address: bool = False
    origins: tuple[str, ...] = ()
    key: Secret | None = None

    def knows_host(self, value: str) -> bool:
        """Return whether a Host header names this server."""
        name, _ = _split_host(value.lower())
        return name in self.hosts or self._is_here(value.lower(), self.any_address)

    def _is_here(self, value: str, any_address: bool) -> bool:
        """Return whether `value` is a name of this server with its port."""
        name, port = _split_host(value)
        if name is None or not (port == self.port or (port is None and self.port == 80)):
            return False
        return name in LOOPBACK or name in self.hosts or (any_address and _is_address(name))

    def knows_origin(self, value: str, host: str) -> bool:
        """Return whether pages of this origin may use the server: its own, and the named ones.

        host: of the request. An address other than that is another machine, even with the port of this server.
        """
        place = value.removeprefix("http://")
        is_own = place != value and self._is_here(place, self.any_address and place == host.lower())
        return is_own or value in self.origins

    def knows_key(self, given: bytes | None) -> bool:
        """Return whether `given` is the key; takes the same time for every wrong one."""
        if self.key is None:
            return True
        known = hashlib.sha256(self.key.reveal().encode()).digest()
        return hmac.compare_digest(hashlib.sha256(given or b"").digest(), known) and given is not None


def _split_host(value: str) -> tuple[str | None, int | None]:
    name, colon, port = value.rpartition(":")
    if not colon or value.endswith("]"):
        return value, None
    if not (port.isascii() and port.isdecimal() and len(port) <= 5) or (":" in name and not name.startswith("[")):
        return None, None
    return name, int(port)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class Guard:
    """ASGI middleware. The body comes to the application whole, in one message."""

    def __init__(self, app: App, access: Access, body_s: float = BODY_S) -> None:
        self._app, self.access, self._body_s = app, access, body_s
        self._held = 0  # bytes of bodies that are being read, or whose requests wait or run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            headers = self._check_headers(scope)
            send = self._with_origin(headers, send)
            if scope["method"] == "OPTIONS" and b"origin" in headers:
                await _preflight(send)
                return
            self._check_key(scope, headers)
            body = b""
            if scope["method"] not in _NO_BODY:
                _check_body_headers(headers)
                body = await self._read(headers, receive)
            self._held += len(body)
            try:
                await self._app(scope, _receiver(body, receive), send)
            finally:
                self._held -= len(body)
        except ApiError as error:
            if error.status == 413:
                await _discard(receive)
            await error_response(scope["path"], error)(scope, receive, send)

    def _check_headers(self, scope: Scope) -> dict[bytes, bytes]:
        raw: list[tuple[bytes, bytes]] = scope["headers"]
        if len(raw) > MAX_HEADERS or sum(len(name) + len(value) for name, value in raw) > MAX_HEADER_BYTES:
            raise ApiError(431, "The headers are too large.")
        target: bytes = scope.get("raw_path") or b""
        if not target.startswith(b"/"):
            raise ApiError(421, "The request target must be a path.")
        if len(target) + len(scope["query_string"]) > MAX_PATH:
            raise ApiError(414, "The path is too long.")
        hosts = [value.decode("latin-1") for name, value in raw if name == b"host"]
        if len(hosts) != 1 or not self.access.knows_host(hosts[0]):
            raise ApiError(421, "The Host header does not name this server.", code="unknown_host")
        found = dict(raw)
        origins = [value.decode("latin-1") for name, value in raw if name == b"origin"]
        if len(origins) > 1 or not all(self.access.knows_origin(each, hosts[0]) for each in origins):
            allow = "To allow an origin, use `localq serve --origin ORIGIN`."
            why = f"Web pages from this origin are not allowed to use this server. {allow}"
            raise ApiError(403, why, code="unknown_origin")
        if not origins and found.get(b"sec-fetch-site", b"none") in (b"cross-site", b"same-site"):
            raise ApiError(403, "Web pages from other sites are not allowed to use this server.", code="unknown_origin")
        return found

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        is_open = scope["path"] in OPEN_PATHS and scope["method"] in _NO_BODY  # bodies take of what others may send
        if is_open or self.access.key is None:
            return
        scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
        given = value.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key")
        if not self.access.knows_key(given):
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The body."""
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18:
            raise ApiError(400, "Content-Length is not a number.")
        if int(length) > json_body.MAX_BYTES:
            raise _too_large()
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(499, "The client disconnected.")
                    part = message.get("body", b"")
                    size, self._held = size + len(part), self._held + len(part)
                    if size > json_body.MAX_BYTES:
                        raise _too_large()
                    if self._held > BODIES_BYTES:
                        raise ApiError(503, "Too many large requests at the same time.", code="overloaded")
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"The body was not received within {self._body_s:g} s.") from None
        finally:
            self._held -= size

    def _with_origin(self, headers: dict[bytes, bytes], send: Send) -> Send:
        """Responses to pages that may use the server say so."""
        origin = headers.get(b"origin")

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
                if origin is not None:
                    more += [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
                message["headers"] = [*message.get("headers", []), *more]
            await send(message)

        return tell


async def _discard(receive: Receive) -> None:
    """Take a part of a body that is refused: a client that is still sending would not read the response."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while size < DISCARD_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def _too_large() -> ApiError:
    return ApiError(413, f"The body is larger than {json_body.MAX_BYTES // 2**20} MiB.", code="request_too_large")


def _check_body_headers(headers: dict[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "The Content-Type must be application/json.")
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise ApiError(415, "Compressed request bodies are not supported.")


async def _preflight(send: Send) -> None:
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", _ALLOWED_HEADERS.encode()),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _receiver(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def next_message() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
