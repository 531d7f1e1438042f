"""The socket of a server that only its user can open: engines for `localq run` and `chat`, answers for `ps` and `stop`.

It speaks the messages of the engine process (`worker.messages`); the other end is `worker.shared`. A connection loads
nothing: it gets the model that the server holds, if that is the one it asks for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from localq import __version__, places
from localq.disk import disk_errors
from localq.errors import ExitCode, LocalqError
from localq.server.model import ModelRequest, OpenModel
from localq.server.slot import Slot
from localq.server.ticket import Ticket
from localq.stats import Stats
from localq.worker import messages, shared
from localq.worker.client import SERVER
from localq.worker.messages import (
    AskStatus,
    Cancel,
    Done,
    Event,
    Failed,
    Generate,
    Holding,
    Load,
    Loaded,
    Ready,
    ServerStatus,
    Shutdown,
    StopServer,
)

MOST_CONNECTIONS = 64
_UNSHARED = "is not available with the `localq serve` engine"


class UserSocket:
    """Listens from `open` to `close`; one thread for each connection."""

    def __init__(self, slot: Slot, model: ModelRequest, stop: Callable[[], None], url: str = "") -> None:
        """model: what the server was started with; stop: ends the server, and returns at once; url: of its API."""
        self.slot, self.model, self.stop, self._url = slot, model, stop, url
        self._started = time.time()
        self._listening: socket.socket | None = None
        self._path: Path | None = None
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()

    def open(self) -> Path:
        """Create the socket and accept connections; returns its path. Raises LocalqError (exit 9)."""
        with disk_errors(places.runtime_dir()):
            path = shared.socket_path(shared.private_folder(), os.getpid())
            new = path.with_suffix(".new")  # front ends remove a socket on which nobody listens so far
            new.unlink(missing_ok=True)  # left by a killed server with this number
            self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            shared.at_short_path(new, self._listening.bind)
            self._listening.listen()
            self._path = new.rename(path)
        threading.Thread(target=self._accept, name="user socket", daemon=True).start()
        return self._path

    def close(self) -> None:
        """Remove the socket, and end all connections; idempotent."""
        listening, self._listening = self._listening, None
        if listening is not None:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        with self._lock:
            connections = list(self._connections)
        for each in connections:
            each.close()

    def _accept(self) -> None:
        while (listening := self._listening) is not None:
            try:
                accepted, _ = listening.accept()
            except OSError:  # closed, or out of descriptors: the next attempt tells
                if self._listening is None:
                    return
                threading.Event().wait(0.1)
                continue
            with self._lock:
                if len(self._connections) >= MOST_CONNECTIONS or not shared.is_own(accepted):
                    accepted.close()
                    continue
                connection = _Connection(self, accepted)
                self._connections.add(connection)
            threading.Thread(target=connection.serve, name="user connection", daemon=True).start()

    def show_loading(self, event: Event) -> None:
        """Send the progress of a load to the front ends that wait for it."""
        with self._lock:
            connections = list(self._connections)
        for each in connections:
            each.show_loading(event)

    def forget(self, connection: _Connection) -> None:
        """`connection` has ended."""
        with self._lock:
            self._connections.discard(connection)

    def status(self) -> ServerStatus:
        """The current status of the server."""
        state, opened = self.slot.state(), self.slot.model
        status = ServerStatus(
            os.getpid(), self.model.name if opened is None else opened.name, __version__, self._url,
            loading=state.loading, busy=state.busy,
            queued=state.queued, started=self._started, unloads_at=state.unloads_at,
        )  # fmt: skip
        if (loaded := state.loaded) is None:
            return status
        return dataclasses.replace(
            status, loaded=True, format=loaded.format, device=loaded.device, context_size=loaded.context_size,
            bytes=sum(loaded.ledger.values()),
        )  # fmt: skip

    def holding(self) -> Holding:
        """The model that the server holds now."""
        model, request = self.slot.model, self.slot.request or self.model
        if model is None:
            return Holding(request.name, request.name, request.wanted.format or "")
        path = os.path.abspath(request.name)
        asked = path if path == model.request.path else request.name  # front ends run in other folders
        return Holding(model.name, asked, request.wanted.format or "", model.request)


def _has_room(connection: socket.socket) -> bool:
    """Return whether a short message can be written at once: on Linux, if at most a quarter of the buffer is used."""
    asked = select.poll()
    asked.register(connection, select.POLLOUT)
    return bool(asked.poll(0))


class _Connection:
    """One front end. Requests are read in one thread; each reply is sent by another, so that Cancel is seen."""

    def __init__(self, owner: UserSocket, connection: socket.socket) -> None:
        self._owner, self._connection = owner, connection
        self._stream = connection.makefile("rb")
        self._writing = threading.Lock()
        self._name = f"user {id(self):x}"  # takes turns with the others
        self._model: ModelRequest | None = None  # once the load has been answered
        self._tickets: dict[int | None, Ticket[Event]] = {}  # by the reply's number; None: of the load

    def serve(self) -> None:
        """Answer requests until either end closes."""
        try:
            self._greet()
            while line := self._stream.readline(messages.MAX_LINE_BYTES):
                request = messages.decode(line)
                if isinstance(request, Shutdown):
                    break
                self._handle(request)
        except (
            OSError,
            ValueError,
            TypeError,
            LocalqError,
        ):  # the front end is gone, closed here, or of another version
            pass
        finally:
            self.close()
            with contextlib.suppress(OSError):
                self._stream.close()
            self._owner.forget(self)

    def close(self) -> None:
        """Cancel what runs, and close; idempotent, from any thread."""
        for ticket in list(self._tickets.values()):
            ticket.cancel()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def show_loading(self, event: Event) -> None:
        """Send `event` if a load has been asked for and not been answered; a front end that does not read misses it.

        The thread of the slot waits for nobody, such as a front end that is stopped with Ctrl-Z.
        """
        if None in self._tickets and self._writing.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError, ValueError):  # it is gone
                    if _has_room(self._connection):
                        self._connection.sendall(messages.encode(event))
            finally:
                self._writing.release()

    def _greet(self) -> None:
        self._send(Ready(self._owner.slot.state().pid or os.getpid()))
        self._send(self._owner.holding())

    def _send(self, event: Event) -> None:
        with self._writing:
            self._connection.sendall(messages.encode(event))

    def _handle(self, request: object) -> None:
        if isinstance(request, Load):
            self._load(request)
        elif isinstance(request, Generate):
            self._generate(request)
        elif isinstance(request, Cancel):
            if (ticket := self._tickets.get(request.id)) is not None:
                ticket.cancel()
        elif isinstance(request, AskStatus):
            self._send(self._owner.status())
        elif isinstance(request, StopServer):
            self._owner.stop()
        else:
            what = type(request).__name__
            error = LocalqError(what, _UNSHARED, "Start the chat with --fresh.", ExitCode.USAGE)
            self._send(Failed(error.to_dict(), getattr(request, "id", None)))

    def _load(self, request: Load) -> None:
        model = self._owner.slot.request or self._owner.model

        def job(opened: OpenModel) -> Iterator[Event]:
            if opened.request != request:
                raise LocalqError(
                    SERVER, "holds a different model, or this model with different options", "", ExitCode.USAGE
                )
            yield opened.loaded

        self._model = model
        self._submit(None, model, job)

    def _generate(self, request: Generate) -> None:
        if self._model is None:
            error = LocalqError(SERVER, "no model is loaded", "Load a model first.", ExitCode.USAGE)
            self._send(Failed(error.to_dict(), request.id))
            return
        self._submit(request.id, self._model, lambda opened: opened.client.generate(request))

    def _submit(self, id: int | None, model: ModelRequest, job: Callable[[OpenModel], Iterator[Event]]) -> None:
        try:
            ticket = self._owner.slot.submit(self._name, model, job)
        except LocalqError as error:  # the queue is full, or the server ends
            self._send(Failed(error.to_dict(), id))
            return
        self._tickets[id] = ticket
        threading.Thread(target=self._pump, args=[id, ticket], name="user reply", daemon=True).start()

    def _pump(self, id: int | None, ticket: Ticket[Event]) -> None:
        """Send what a job yields. A reply that was cancelled while it waited has not yielded its end."""
        ended = False
        try:
            for event in ticket:
                ended = ended or isinstance(event, Loaded | Done)
                self._send(event)
            if not ended and id is not None:
                self._send(Done(id, "cancelled", Stats("done")))
        except LocalqError as error:
            with contextlib.suppress(OSError):
                self._send(Failed(error.to_dict(), id))
        except OSError:  # the front end is gone
            ticket.cancel()
        finally:
            if self._tickets.get(id) is ticket:
                del self._tickets[id]
