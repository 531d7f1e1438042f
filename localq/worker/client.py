"""The front end's side of the engine process: start it, send requests, report its death with the cause.

Torch-free. One request at a time; `cancel` may be called from another thread. A dead process raises LocalqError, and
the next `load` starts a new one, if `recovery` permits it. A process that is silent for too long is killed here,
because its own watchdog may hang with it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from localq.errors import ExitCode, LocalqError
from localq.processes import exit_reason, last_message
from localq.worker import messages
from localq.worker.load_deaths import LoadedFiles
from localq.worker.messages import (
    DOCTOR,
    GPU,
    PROCESS,
    SHORTEN,
    STEP_LIMIT_S,
    CacheRestored,
    CacheSaved,
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
    Progress,
    Request,
    RestoreCache,
    SaveCache,
    Tokens,
)
from localq.worker.process import KILL_S, EngineProcess
from localq.worker.recovery import CanaryResult, Recovery, canary_request
from localq.worker.shared import SharedEngine, SharedProcess

# -P: the working folder (it may be a downloaded model) must not provide modules
COMMAND = (sys.executable, "-P", "-m", "localq.worker.server")
LOG_LINES = 200
SILENCE_S = STEP_LIMIT_S + 5.0  # the process's own watchdog reacts first, if it can
FILE_S = 300.0  # 4 GiB, to a disk of 15 MB/s
Answer = TypeVar("Answer", Profiled, CacheSaved, CacheRestored)
NEXT = "Your next message will start a new engine process."
ONCE = "Run the command again."  # where no message follows
SERVER = "server"  # subject of errors of a shared engine


class EngineClient:
    """A client of one engine process. `start` returns at once; torch loads in the process while the front end draws."""

    def __init__(
        self,
        command: Sequence[str] = COMMAND,
        recovery: Recovery | None = None,
        silence_s: float = SILENCE_S,
        file_s: float = FILE_S,
        shared: SharedEngine | None = None,
    ) -> None:
        """Set the limits: silence_s without an event in a reply on a GPU, file_s for a snapshot.

        shared: a server's engine, which is used as long as it holds what is loaded; else a process of its own.
        """
        self._command, self._shared = tuple(command), shared
        self._recovery = recovery or Recovery()
        self._silence_s, self._file_s = silence_s, file_s
        self._ids = itertools.count(-1, -1)  # for requests other than replies, whose ids count up in the session
        self.next_step = NEXT  # after a death in a reply; ONCE where no message follows
        self._loaded: Loaded | None = None
        self._loading: LoadedFiles | None = None
        self._process: EngineProcess | SharedProcess | None = None
        self._events: queue.Queue[Event | LocalqError | None] = queue.Queue()
        self._log: collections.deque[str] = collections.deque(maxlen=LOG_LINES)

    # ---- the process

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.alive

    @property
    def pid(self) -> int | None:
        """The id of the running process, None without one."""
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def log(self) -> tuple[str, ...]:
        """The last lines that the process wrote to stderr."""
        return tuple(self._log)

    @property
    def is_shared(self) -> bool:
        """True while the engine is that of a server."""
        return isinstance(self._process, SharedProcess)

    def share(self, engine: SharedEngine) -> None:
        """Use the engine of a server from the next load on, if that holds what is loaded."""
        self._drop_shared()
        self._shared = engine

    def start(self) -> None:
        """Start the process unless it runs, in a separate session, so that Ctrl-C at the terminal does not reach it.

        Where a server's engine may serve, the load decides.
        """
        if self._shared is None and not self.alive:
            self._begin(lambda: EngineProcess(self._command))

    def _start_for(self, request: Load) -> None:
        """Start a process for `request`, or take the server's engine, if that holds it."""
        if self._shared is not None and not self._shared.holds(request):
            if self.is_shared:
                self._end_process()
            self._drop_shared()
        shared = self._shared
        if not self.alive:
            self._begin(lambda: EngineProcess(self._command) if shared is None else SharedProcess(shared))

    def _begin(self, start: Callable[[], EngineProcess | SharedProcess]) -> None:
        self._end_process()
        self._events = queue.Queue()
        self._log.clear()
        self._process = start()
        self._process.listen(self._events, self._log)

    def close(self) -> None:
        """End the process within 2 s, or the connection to a server; idempotent."""
        self._end_process()
        self._drop_shared()

    def _end_process(self) -> None:
        process, self._process, self._loaded = self._process, None, None
        if process is not None:
            process.end()

    def _drop_shared(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def __enter__(self) -> EngineClient:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- requests

    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded:
        """Load a model, in a new process if none runs; `on_event` gets Loading events.

        On a GPU a few known tokens are generated as well, which a later process must reproduce: see `recovery`.
        """
        if self._process is not None and not self.alive:
            self._death()  # not reported yet
        asked = request if self.alive else self._recovery.permit(request)
        self._start_for(asked)
        self._loaded, self._loading = None, None if self.is_shared else LoadedFiles.of(Path(asked.path))
        try:
            self._send(asked)
            for event in self._replies():
                if isinstance(event, Loading) and on_event is not None:
                    on_event(event)
                elif isinstance(event, Loaded):
                    return self._confirm(request, event)
                elif isinstance(event, Failed) and event.id is None:
                    if self.is_shared and event.error["what"] == SERVER:  # it has taken another model since
                        break
                    raise self._failure(event)
        finally:
            self._loading = None
        if self.is_shared:
            self.close()
            return self.load(request, on_event)
        raise AssertionError("replies end only by raising")

    def _confirm(self, request: Load, loaded: Loaded) -> Loaded:
        if self.is_shared:  # the server has told its notes, and has checked the engine
            loaded = dataclasses.replace(loaded, shared=True, load_s=0.0, stages={}, notes=[])
        self._loaded = loaded
        if self.is_shared:
            return loaded
        try:
            self._recovery.confirm(request, loaded, self._canary)
        except LocalqError:
            self.close()
            raise
        return loaded

    def _canary(self) -> CanaryResult:
        assert self._loaded is not None
        ids: list[int] = []
        try:
            for event in self.generate(canary_request(self._loaded)):
                ids += event.ids if isinstance(event, Tokens) else []
        except LocalqError as error:
            if not self.alive:
                raise
            return *ids, str(error)  # non-finite logits: the same error text counts like the same ids
        return (*ids, event.reason if isinstance(event, Done) else "")

    def profile(self, request: Profile) -> dict[str, Any]:
        """Profile one decode step of the loaded model; returns `StepProfile.to_dict()`."""
        return self._answer(dataclasses.replace(request, id=next(self._ids)), Profiled).profile

    def save_cache(self, path: str) -> int:
        """Write the KV cache to a file; returns its bytes."""
        return self._answer(SaveCache(path, next(self._ids)), CacheSaved, self._file_s).bytes

    def restore_cache(self, path: str) -> int:
        """Restore the KV cache from a file; returns its tokens. Raises LocalqError on failure: prefill instead."""
        return self._answer(RestoreCache(path, next(self._ids)), CacheRestored, self._file_s).tokens

    def _answer(
        self, request: Profile | SaveCache | RestoreCache, kind: type[Answer], limit_s: float | None = None
    ) -> Answer:
        """Wait for the answer to `request`; answers to requests that were abandoned (Ctrl-C) are skipped."""
        if not self.alive:
            raise self._death()
        self._send(request)
        for event in self._replies(limit_s):
            if isinstance(event, kind) and event.id == request.id:
                return event
            if isinstance(event, Failed) and event.id in (request.id, None):
                raise self._failure(event)
        raise AssertionError("replies end only by raising")

    def generate(self, request: Generate) -> Iterator[Event]:
        """Yield Progress and Tokens, then Done. Closing the iterator early cancels the reply."""
        if not self.alive:
            raise self._death()
        self._send(request)
        finished = False
        limit_s = self._silence_s if self._on_gpu and not self.is_shared else None
        try:
            for event in self._replies(limit_s):
                finished = isinstance(event, Done | Failed) and event.id in (request.id, None)
                if isinstance(event, Failed) and finished:
                    raise self._failure(event)
                if isinstance(event, Progress | Tokens | Done) and event.id == request.id:
                    yield event
                    if finished:
                        return
        finally:
            if not finished and self.alive:
                self.cancel(request.id)

    def cancel(self, id: int) -> None:
        """Stop the reply `id` within one step; thread-safe; ignored when the process is gone."""
        if self.alive:
            self._send(Cancel(id))

    # ---- inside

    def _send(self, request: Request) -> None:
        line = messages.encode(request)
        if len(line) > messages.MAX_LINE_BYTES:
            limit = f"the prompt is too large (limit: {messages.MAX_LINE_BYTES // 2**20} MiB)"
            raise LocalqError(PROCESS, limit, SHORTEN, ExitCode.USAGE)
        process, matters = self._process, not isinstance(request, Cancel)
        if process is None:
            if not matters:  # it ended since the check in `cancel`
                return
            raise self._death()
        try:
            process.write(line)
        except (OSError, ValueError) as error:
            if not matters:
                return
            raise self._death() from error

    @property
    def _on_gpu(self) -> bool:
        return self._loaded is not None and self._loaded.device == "cuda"

    def _replies(self, limit_s: float | None = None) -> Iterator[Event]:
        while True:
            event = self._next(limit_s)
            if event is None:
                raise self._death()
            if isinstance(event, LocalqError):
                self.close()
                raise event
            yield event

    def _next(self, limit_s: float | None) -> Event | LocalqError | None:
        try:
            return self._events.get(timeout=limit_s)
        except queue.Empty:
            pass
        try:  # if this process was stopped (Ctrl-Z), events from that time are still arriving
            return self._events.get(timeout=KILL_S)
        except queue.Empty:
            process, on_gpu = self._process, self._on_gpu
            if process is not None:
                process.kill()
            self.close()
            why = f"the engine process did not respond for {limit_s:g} s and was killed"
            raise self._recovery.after(self._dead(GPU if on_gpu else PROCESS, why), on_gpu) from None

    def _failure(self, failed: Failed) -> LocalqError:
        error = failed.to_error()
        if not failed.dying or self.is_shared:
            return error
        on_gpu = self._on_gpu or error.what == GPU
        if not error.next_step:
            error = self._dead(error.what, error.why, error.exit_code)
        self.close()
        return self._recovery.after(error, on_gpu)

    def _dead(self, what: str, why: str, code: ExitCode = ExitCode.FAILURE) -> LocalqError:
        """Return the error for a process that has ended. Only a loaded model promises that a message goes on."""
        if self._loading is not None:
            return LocalqError(what, why, DOCTOR, code)
        return LocalqError(what, why, self.next_step, code)

    def _death(self) -> LocalqError:
        """Return the error for a missing process: its signal or exit code, and its last log line."""
        process = self._process
        if isinstance(process, SharedProcess):
            self.close()  # the next load starts a process
            return self._dead(SERVER, "closed the connection")
        if process is None:
            return self._dead(PROCESS, "not running")
        code = process.code()
        last, on_gpu = last_message(self._log), self._on_gpu
        if self._loading is not None:
            error = self._loading.death(code, last)
        else:
            error = self._dead(PROCESS, f"stopped unexpectedly ({exit_reason(code)})" + (f": {last}" if last else ""))
        self.close()
        return self._recovery.after(error, on_gpu)
