"""`LimitedProtocol`: uvicorn's HTTP protocol with limits of a connection, before there is a request.

headers   must be there within HEADER_S; too large ones are answered with 431
number    connections beyond MAX_CONNECTIONS are answered with 503
buffers   of the socket are small, so that a client that does not read is noticed; it is cut after WRITE_S
ahead     what a client sends before it has its response is read, so that its end is noticed; too much cuts it
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from localq.server import responses
from localq.server.guard import DISCARD_BYTES

HEADER_S = 10.0
MAX_CONNECTIONS = 512
SEND_BUFFER = 128 * 1024  # bytes in the kernel
AHEAD_BYTES = 64 * 1024  # of later requests, while one is answered
_BODIES = {
    400: b'{"error":{"message":"The request is not valid HTTP.","type":"invalid_request_error",'
    b'"param":null,"code":null}}',
    408: b'{"error":{"message":"The headers did not come in time.","type":"invalid_request_error",'
    b'"param":null,"code":null}}',
    431: b'{"error":{"message":"The headers are too large.","type":"invalid_request_error","param":null,"code":null}}',
    503: b'{"error":{"message":"Too many connections.","type":"server_error","param":null,"code":"overloaded"}}',
}
_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large",
            503: b"Service Unavailable"}  # fmt: skip


class _HttpConnection(h11.Connection):
    """Keeps the status that h11 proposes for a malformed request."""

    status_hint = 400

    def next_event(self) -> Any:
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            self.status_hint = error.error_status_hint
            raise


class LimitedProtocol(H11Protocol):
    """See the module. Applications find `abort`, which cuts the connection, in the state of a request."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, {**app_state, "abort": self.abort}, _loop)
        self.conn = _HttpConnection(h11.SERVER, config.h11_max_incomplete_event_size)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unwanted = 0  # bytes of a body whose response is written

    def connection_made(self, transport: Any) -> None:
        """Handle a new connection."""
        super().connection_made(transport)
        self._wait_for_headers()
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(503)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_headers()
        if self._is_unwanted(data):
            self.transport.close()
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._clear_timer()
            self._read_ahead()

    def _is_unwanted(self, data: bytes) -> bool:
        """Return whether `data` takes a refused body that has not ended past `DISCARD_BYTES`."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        is_body = is_answered and self.conn.their_state is h11.SEND_BODY
        self._unwanted = self._unwanted + len(data) if is_body else 0
        return self._unwanted > DISCARD_BYTES

    def _read_ahead(self) -> None:
        """Go on reading where uvicorn pauses for a pipelined request: who does not read does not see a client go."""
        if self.flow.read_paused and self.conn.their_state is h11.DONE:
            if len(self.conn.trailing_data[0]) > AHEAD_BYTES:
                self.abort()
            else:
                self.flow.resume_reading()

    def pause_writing(self) -> None:
        """The client does not take what is written."""
        super().pause_writing()
        self._cut_late()

    def resume_writing(self) -> None:
        """It has taken it."""
        if self._write_timer is not None and not self.transport.is_closing():
            self._clear_write_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._cut_late()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._clear_timer()
        self._clear_write_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """A response is written; an idle connection is closed by uvicorn."""
        self._clear_timer()
        super().on_response_complete()
        if self.transport.is_closing():
            self._cut_late()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        status = getattr(self.conn, "status_hint", 400)
        self._refuse(status if status in _BODIES else 400)

    def abort(self) -> None:
        """Cut the connection; what is not sent is lost."""
        self.transport.abort()

    def _wait_for_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_S, self._refuse, 408)

    def _clear_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _cut_late(self) -> None:
        """Cut the connection if what is written is not taken in time: closing waits for that, without an end."""
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(responses.WRITE_S, self.abort)

    def _clear_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse(self, status: int) -> None:
        """Answer without an application, and close."""
        self._clear_timer()
        if self.transport.is_closing():
            return
        body = _BODIES[status]
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
            more = b"retry-after: 5\r\n" if status == 503 else b""
            self.transport.write(head % (status, _PHRASES[status], len(body)) + more + b"\r\n" + body)
        self.transport.close()
        self._cut_late()
