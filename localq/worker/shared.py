"""Engines that a server of this user holds: how a front end finds one, and its end of the connection.

A server (`localq serve`) listens on a Unix socket in `places.runtime_dir()`, a folder that only this user can open.
It speaks what the engine process speaks over its pipes (`messages`), so that `EngineClient` takes a `SharedProcess` as
it takes an `EngineProcess`. Torch-free.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from localq import places
from localq.errors import ExitCode, LocalqError
from localq.worker import messages, pipes
from localq.worker.messages import AskStatus, Event, Holding, Load, Ready, ServerStatus, StopServer

SUFFIX = ".sock"
GREETING_S = 1.0  # for the first lines of a server, which it has ready
STOP_S = 15.0  # for the end of a server, whose replies may take 10 s
_PEER = struct.Struct("3i")  # pid, uid and gid of SO_PEERCRED


def socket_path(folder: Path, pid: int) -> Path:
    """The socket of the server with this process id."""
    return folder / f"{pid}{SUFFIX}"


def is_private(folder: Path) -> bool:
    """Return whether `folder` is a folder of this user that nobody else can open. Raises OSError if there is none."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def private_folder() -> Path:
    """`places.runtime_dir()`, which is created. Raises LocalqError (exit 9) where others can open it, or OSError."""
    folder = places.runtime_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        step = f"Remove it, or run `chmod 700 {folder}` if it is yours."
        raise LocalqError(str(folder), "other users can open this folder", step, ExitCode.DISK)
    return folder


def at_short_path(path: Path, call: Callable[[str], object]) -> None:
    """`call` with another path of the socket `path`: an address has room for 107 bytes. Raises OSError."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(GREETING_S)
        at_short_path(path, connection.connect)
    except BaseException:
        connection.close()
        raise
    return connection


def is_own(connection: socket.socket) -> bool:
    """Return whether this user runs the process at the other end."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(peer)[1] == os.geteuid())


@dataclass
class SharedEngine:
    """A connection to a server, after its greeting."""

    connection: socket.socket
    stream: BinaryIO
    ready: Ready
    holding: Holding

    def holds(self, request: Load) -> bool:
        """Return whether the server holds the model of `request`, with the same options; True before the first load."""
        return self.holding.load in (None, request)

    def selects(self, name: str, format: str | None) -> bool:
        """Return whether a request for model `name` in `format` (None: any) means the model of this server."""
        holding = self.holding
        if format is not None and format != holding.format:
            return name == holding.model and holding.model.endswith(f"@{format}")
        known = (holding.model.casefold(), holding.asked.casefold())
        return name.strip().casefold() in known or os.path.abspath(name) == holding.asked

    def status(self) -> ServerStatus:
        """The status of the server. Raises LocalqError or OSError where it does not answer."""
        self.connection.sendall(messages.encode(AskStatus()))
        answer = _read(self.stream)
        if not isinstance(answer, ServerStatus):
            raise LocalqError("server", "did not report its status", "Restart it.")
        return answer

    def stop(self) -> bool:
        """Ask the server to end, and wait for that; False where it has not ended within STOP_S."""
        self.connection.settimeout(STOP_S)
        try:
            self.connection.sendall(messages.encode(StopServer()))
            while self.stream.readline(messages.MAX_LINE_BYTES):
                pass
        except TimeoutError:
            return False
        except OSError:  # reset: it has ended
            pass
        return True

    def close(self) -> None:
        """Close the connection; idempotent."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # wakes a reader in another thread
        with contextlib.suppress(OSError, ValueError):
            self.stream.close()
        self.connection.close()


def servers() -> Iterator[SharedEngine]:
    """Connections to all servers of this user, each closed when the next is asked for. Leftover sockets are removed."""
    for path in sockets():
        if (engine := open_engine(path)) is not None:
            try:
                yield engine
            finally:
                engine.close()


def sockets() -> list[Path]:
    """The sockets of this user's servers, leftover ones included, in order of their process ids."""
    folder = places.runtime_dir()
    try:
        if not is_private(folder):
            return []
        found = [path for path in folder.iterdir() if path.suffix == SUFFIX and path.stem.isdecimal()]
    except OSError:  # there is none
        return []
    return sorted(found, key=lambda path: int(path.stem))


def open_engine(path: Path) -> SharedEngine | None:
    """The server at `path`; None where none answers."""
    try:
        connection = _connect(path)
    except ConnectionRefusedError:  # left by a server that was killed
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    except OSError:
        return None
    stream = connection.makefile("rb")
    with contextlib.suppress(OSError, LocalqError):  # another version, or busy beyond reason
        if is_own(connection):
            ready, holding = _read(stream), _read(stream)
            if isinstance(ready, Ready) and isinstance(holding, Holding):
                return SharedEngine(connection, stream, ready, holding)
    stream.close()
    connection.close()
    return None


def _read(stream: BinaryIO) -> object:
    return messages.decode(stream.readline(messages.MAX_LINE_BYTES))


def find(name: str, format: str | None) -> SharedEngine | None:
    """A server that holds the model a user means by `name`; None without one. The caller closes it."""
    for path in sockets():
        if (engine := open_engine(path)) is not None:
            if engine.selects(name, format):
                return engine
            engine.close()
    return None


class SharedProcess:
    """A server's engine in the place of an `EngineProcess`: ending it ends the connection only."""

    def __init__(self, engine: SharedEngine) -> None:
        self._engine = engine
        self._writing = threading.Lock()
        self._reader: threading.Thread | None = None
        self._closed = False

    def listen(self, events: queue.Queue[Event | LocalqError | None], log: collections.deque[str]) -> None:
        """Start the reader thread: events go into `events`, None at the end. `log` stays empty: the server has it."""
        self._engine.connection.settimeout(None)
        self._reader = threading.Thread(target=self._read, args=[events], daemon=True)
        self._reader.start()

    def _read(self, events: queue.Queue[Event | LocalqError | None]) -> None:
        try:
            pipes.read_events(self._engine.stream, events)
        except (OSError, ValueError):  # reset, or closed here
            events.put(None)
        self._closed = True

    @property
    def alive(self) -> bool:
        """True until either end closes the connection."""
        return not self._closed

    @property
    def pid(self) -> int:
        """The id of the server's engine process."""
        return self._engine.ready.pid

    def write(self, line: bytes) -> None:
        """Send a line; thread-safe. Raises OSError where the connection is closed."""
        with self._writing:
            self._engine.connection.sendall(line)

    def kill(self) -> None:
        """Close the connection."""
        self.end()

    def end(self) -> None:
        """Close the connection; a reply that is running is cancelled by the server."""
        self._closed = True
        self._engine.close()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(GREETING_S)
