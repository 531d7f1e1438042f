"""The front end's side of the engine process: spawn it, talk to it, report its death with the cause.

Torch-free. One request at a time; `cancel` may be called from another thread. A dead process raises LocalqError, and
the next `load` starts a new one.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from localq.errors import ExitCode, LocalqError
from localq.worker import messages
from localq.worker.messages import (
    Cancel,
    Done,
    Event,
    Failed,
    Generate,
    Load,
    Loaded,
    Loading,
    Profile,
    Profiled,
    Ready,
    Shutdown,
)

# -P: the folder the user stands in (it may be a downloaded model) must not provide modules
COMMAND = (sys.executable, "-P", "-m", "localq.worker.server")
LOG_LINES = 200
LOG_LINE_BYTES = 2000
CLOSE_S = 1.0  # for a polite end; then SIGTERM, then SIGKILL
KILL_S = 0.5
_NEXT = "The next message starts a new engine process."


class EngineClient:
    """One engine process at a time. `start` returns at once; torch loads over there while the front end draws."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._events: queue.Queue[Event | LocalqError | None] = queue.Queue()
        self._log: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self._readers: list[threading.Thread] = []
        self._sending = threading.Lock()

    # ---- the process

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of the living process."""
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def log(self) -> tuple[str, ...]:
        """The last lines that the process wrote to stderr."""
        return tuple(self._log)

    def start(self) -> None:
        """Spawn the process unless it lives. Its own session, so that a Ctrl-C at the terminal does not reach it."""
        if self.alive:
            return
        self.close()
        self._events = queue.Queue()
        self._log.clear()
        self._process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=environment(),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [
            threading.Thread(target=_read_events, args=(process.stdout, self._events), daemon=True),
            threading.Thread(target=_read_log, args=(process.stderr, self._log), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def close(self) -> None:
        """End the process within 2 s; more than once is fine."""
        process, self._process = self._process, None
        if process is None:
            return
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
        for reader in self._readers:
            reader.join(KILL_S)

    def __enter__(self) -> EngineClient:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- requests

    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded:
        """Load a model, starting the process if there is none. `on_event` gets Loading events."""
        self.start()
        self._send(request)
        for event in self._replies():
            if isinstance(event, Loading) and on_event is not None:
                on_event(event)
            elif isinstance(event, Loaded):
                return event
            elif isinstance(event, Failed) and event.id is None:
                raise self._failure(event)
        raise AssertionError("replies end only by raising")

    def profile(self, request: Profile) -> dict[str, Any]:
        """Where the time of one decode step of the loaded model goes: `StepProfile.to_dict()`."""
        if not self.alive:
            raise self._death()
        self._send(request)
        for event in self._replies():
            if isinstance(event, Profiled):
                return event.profile
            if isinstance(event, Failed) and event.id is None:
                raise self._failure(event)
        raise AssertionError("replies end only by raising")

    def generate(self, request: Generate) -> Iterator[Event]:
        """Progress, Tokens, and last Done. Closing the iterator early cancels the reply."""
        if not self.alive:
            raise self._death()
        self._send(request)
        finished = False
        try:
            for event in self._replies():
                finished = isinstance(event, Done | Failed) and event.id in (request.id, None)
                if isinstance(event, Failed) and finished:
                    raise self._failure(event)
                if not isinstance(event, Ready | Loading | Loaded | Profiled | Failed) and event.id == request.id:
                    yield event
                    if finished:
                        return
        finally:
            if not finished and self.alive:
                self.cancel(request.id)

    def cancel(self, id: int) -> None:
        """Stop the reply `id` within one step; safe from any thread. A process that is gone needs no cancelling."""
        if self.alive:
            self._send(Cancel(id))

    # ---- inside

    def _send(self, request: Load | Generate | Profile | Cancel) -> None:
        line = messages.encode(request)
        if len(line) > messages.MAX_LINE_BYTES:
            limit = f"the prompt is longer than {messages.MAX_LINE_BYTES // 2**20} MiB"
            raise LocalqError("engine process", limit, "Shorten it.", ExitCode.USAGE)
        process = self._process
        if process is None or process.stdin is None:
            raise self._death()
        try:
            with self._sending:
                process.stdin.write(line)
                process.stdin.flush()
        except (OSError, ValueError) as error:
            if isinstance(request, Cancel):
                return
            raise self._death() from error

    def _replies(self) -> Iterator[Event]:
        while True:
            event = self._events.get()
            if event is None:
                raise self._death()
            if isinstance(event, LocalqError):
                self.close()
                raise event
            yield event

    def _failure(self, failed: Failed) -> LocalqError:
        if failed.dying:
            self.close()
        return failed.to_error()

    def _death(self) -> LocalqError:
        """Why there is no process: its signal or exit code, and the last thing that it said."""
        process = self._process
        if process is None:
            return LocalqError("engine process", "not running", _NEXT)
        try:
            code = process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        for reader in self._readers:
            reader.join(KILL_S)
        said = last_words(self._log)
        return LocalqError("engine process", f"ended ({_ending(code)})" + (f": {said}" if said else ""), _NEXT)


def last_words(log: Sequence[str] | collections.deque[str]) -> str:
    """The last line of a log that means something: not blank, not the inside of a traceback."""
    lines = [line.strip() for line in log if line.strip() and not line.startswith((" ", "\t"))]
    return lines[-1] if lines else ""


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def environment() -> dict[str, str]:
    """The front end's environment; a source tree that is not installed is made importable in spite of -P."""
    environment = dict(os.environ)
    root = Path(__file__).resolve().parents[2]
    if root != Path(sysconfig.get_path("purelib")).resolve() and root != Path(sysconfig.get_path("platlib")).resolve():
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{inherited}" if inherited else str(root)
    return environment


def _read_events(stdout: BinaryIO, events: queue.Queue[Event | LocalqError | None]) -> None:
    with stdout:
        while line := stdout.readline(messages.MAX_LINE_BYTES):
            try:
                event = messages.decode(line)
            except LocalqError as error:
                events.put(error)
                continue
            if not isinstance(event, Load | Generate | Profile | Cancel | Shutdown):
                events.put(event)
    events.put(None)


def _read_log(stderr: BinaryIO, log: collections.deque[str]) -> None:
    with stderr:
        while line := stderr.readline(LOG_LINE_BYTES):
            log.append(line.decode("utf-8", "replace").rstrip())
