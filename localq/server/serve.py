"""Listening: the socket, uvicorn, signals, and an orderly end.

SIGTERM and Ctrl-C stop accepting, end what waits with an error, give running replies DRAIN_S, and then cut them with an
error; the whole takes at most 10 s. A second Ctrl-C cuts them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from localq.errors import ExitCode, LocalqError, usage_error
from localq.server.guard import MAX_HEADER_BYTES, App
from localq.server.protocol import LimitedProtocol
from localq.server.slot import Slot

DRAIN_S, SHUTDOWN_S = 6.0, 7.0
KEEP_CONNECTION_S = 30  # an idle connection is kept so long
_BACKLOG = 512


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free one. Raises LocalqError (exit 2, or 1 for a port in use)."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise usage_error(f"--host {host}", "cannot be resolved to an address", "Use 127.0.0.1.") from error
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        raise _why_not(host, port, error) from error
    return found


def _why_not(host: str, port: int, error: OSError) -> LocalqError:
    what = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return LocalqError(what, "this port is already in use", "Use another port: --port 8001.")
    if error.errno == errno.EACCES:
        return usage_error(what, "ports below 1024 require root privileges", "Use --port 8000.")
    return usage_error(what, f"cannot listen on this address ({error.strerror})", "Use --host 127.0.0.1.")


def run(server: DrainingServer, listening: socket.socket) -> int:
    """Serve until a signal comes or `stop` is called; returns the exit code. The slot is drained, not closed."""
    asyncio.run(server.serve(sockets=[listening]))
    return ExitCode.OK


def make(app: App, slot: Slot, say: Callable[[str], None]) -> DrainingServer:
    """A server with the limits of `protocol`. say: shows a line."""
    logging.getLogger("uvicorn.error").disabled = True  # else every malformed request is a line on stderr
    config = uvicorn.Config(
        app, http=LimitedProtocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        proxy_headers=False, timeout_keep_alive=KEEP_CONNECTION_S, h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=int(SHUTDOWN_S), backlog=_BACKLOG,
    )  # fmt: skip
    return DrainingServer(config, slot, say)


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which drains the slot first."""

    def __init__(self, config: uvicorn.Config, slot: Slot, say: Callable[[str], None]) -> None:
        super().__init__(config)
        self._slot, self._say = slot, say

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals here; uvicorn would raise them again at the end. In a thread there are none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def stop(self) -> None:
        """End the server as SIGTERM does; returns at once, callable from any thread."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; again: at once."""
        if self.should_exit:
            self.force_exit = True
            self._slot.cut()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the replies, then the connections."""
        state = self._slot.state()
        if state.busy or state.queued:
            self._say(f"stopping: the current reply has {DRAIN_S:.0f} s to finish")
        self._slot.drain(DRAIN_S)
        await super().shutdown(sockets)
