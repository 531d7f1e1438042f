"""An engine process and its pipes, as the front end holds them: begun, listened to, written to, ended. Torch-free."""

from __future__ import annotations

import collections
import contextlib
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence

from localq.errors import LocalqError
from localq.processes import environment
from localq.worker import messages, pipes
from localq.worker.messages import Event, Shutdown

CLOSE_S = 1.0  # for a polite end; then SIGTERM, then SIGKILL
KILL_S = 0.5


class EngineProcess:
    """Begun by being made, in a session of its own: a Ctrl-C at the terminal does not reach it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._readers: list[threading.Thread] = []
        self._writing = threading.Lock()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=environment(),
        )

    def listen(self, events: queue.Queue[Event | LocalqError | None], log: collections.deque[str]) -> None:
        """From here on, in threads: what it says goes into `events`, None at its end; lines of stderr into `log`."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=pipes.read_events, args=(self._process.stdout, events), daemon=True),
            threading.Thread(target=pipes.read_log, args=(self._process.stderr, log), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def alive(self) -> bool:
        """True while it runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process, also of one that has ended."""
        return self._process.pid

    def write(self, line: bytes) -> None:
        """From any thread. Raises OSError or ValueError where it is gone, or its pipe is."""
        assert self._process.stdin is not None
        with self._writing:
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def kill(self) -> None:
        """At once."""
        self._process.kill()

    def end(self) -> None:
        """Within 2 s."""
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone already, or its pipe is
            process.stdin.write(messages.encode(Shutdown()))
        with contextlib.suppress(OSError):
            process.stdin.close()
        ends: tuple[tuple[Callable[[], object], float], ...] = (
            (process.poll, CLOSE_S),
            (process.terminate, KILL_S),
            (process.kill, KILL_S),
        )
        for end, wait_s in ends:
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
                break
        self._heard_out()

    def code(self) -> int:
        """The code that it ended with, everything that it said having been heard; one that lives on is killed."""
        try:
            code = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._heard_out()
        return code

    def _heard_out(self) -> None:
        for reader in self._readers:
            reader.join(KILL_S)
