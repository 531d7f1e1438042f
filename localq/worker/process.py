"""An engine process and its pipes on the front end's side: start, listen, write, end. Torch-free."""

from __future__ import annotations

import collections
import contextlib
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence

from localq.errors import LocalqError
from localq.processes import child_environment, start_child
from localq.worker import messages, pipes
from localq.worker.messages import Event, Shutdown

CLOSE_S = 1.0  # for an orderly end; then SIGTERM, then SIGKILL
KILL_S = 0.5
# What libgomp takes where it has more threads than there are processors. Its 300,000 rounds elsewhere are up to 10 ms
# for which a thread that waits keeps a processor from other programs, and from the thread that it waits for: beside
# other programs, a step takes ten times as long.
SPIN_COUNT = ("GOMP_SPINCOUNT", "1000")


class EngineProcess:
    """An engine process, started by the constructor in a separate session: Ctrl-C at the terminal does not reach it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._readers: list[threading.Thread] = []
        self._writing = threading.Lock()
        self._process = start_child(
            lambda: subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=_environment(),
            )
        )

    def listen(self, events: queue.Queue[Event | LocalqError | None], log: collections.deque[str]) -> None:
        """Start the reader threads: events go into `events`, None at the end; lines of stderr into `log`."""
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
        """True while the process runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The id of the process, also after its end."""
        return self._process.pid

    def write(self, line: bytes) -> None:
        """Write a line; thread-safe. Raises OSError or ValueError where the process or its pipe is gone."""
        assert self._process.stdin is not None
        with self._writing:
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def end(self) -> None:
        """End the process within 2 s."""
        process = self._process
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the process or its pipe is gone
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
        self._join_readers()

    def code(self) -> int:
        """Return the exit code after all output is read; a process that does not end is killed."""
        try:
            code = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._join_readers()
        return code

    def _join_readers(self) -> None:
        for reader, pipe in zip(self._readers, (self._process.stdout, self._process.stderr), strict=False):
            if reader.ident is not None:
                reader.join(KILL_S)
            elif pipe is not None:  # a signal came before the reader was started, which would close it
                pipe.close()


def _environment() -> dict[str, str]:
    """The environment of an engine process; what the user has set of OpenMP's waiting stays."""
    found, (name, value) = child_environment(), SPIN_COUNT
    return found if name in found or "OMP_WAIT_POLICY" in found else {**found, name: value}
