"""The engine process: `python -m localq.worker.server`. Requests arrive on stdin, events go to the original stdout.

The process sends Ready before torch is imported. A thread reads stdin, so that Cancel works during a reply, and the end
of stdin (the front end is gone) ends the process at once; the kernel kills a stopped one: there are no orphans. Output
of libraries goes to stderr. A CUDA error is sticky and only a new process cures it, so the process reports it and ends.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NoReturn

from localq import disk, processes
from localq.errors import ExitCode, LocalqError
from localq.stats import Stats, TokenLogprob
from localq.worker import messages
from localq.worker.backend import Backend, TorchBackend
from localq.worker.faults import first_line, is_device_fault, is_out_of_memory
from localq.worker.messages import (
    DOCTOR,
    GPU,
    PROCESS,
    REPORT,
    SHORTEN,
    STEP_LIMIT_S,
    Cancel,
    Done,
    Event,
    Failed,
    Generate,
    Load,
    Loading,
    Profile,
    Progress,
    Ready,
    RestoreCache,
    SaveCache,
    Shutdown,
    Tokens,
)

BATCH_S = 0.025  # tokens are sent together when they come faster than this
_LESS = "Use a smaller model or a shorter context (--ctx), or close other programs."


class Server:
    """The request loop around a backend; `read_requests` runs in a separate thread."""

    def __init__(self, requests: BinaryIO, events: BinaryIO, step_limit_s: float = STEP_LIMIT_S) -> None:
        self._requests, self._events = requests, events
        self._step_limit_s = step_limit_s
        self._inbox: queue.SimpleQueue[Load | Generate | Profile | SaveCache | RestoreCache] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._sending = threading.Lock()
        self._deadline: float | None = None  # monotonic seconds; None = nothing is watched

    # ---- the pipe

    def send(self, event: Event) -> None:
        """Write one event; ends the process when the front end is gone."""
        try:
            with self._sending:
                self._events.write(messages.encode(event))
                self._events.flush()
        except OSError:
            os._exit(ExitCode.CLOSED_PIPE)

    def read_requests(self) -> None:
        """Read requests: Cancel acts at once, work is queued, the end of the pipe ends the process."""
        while line := self._requests.readline(messages.MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                self._skip_line(line)
                continue
            try:
                request = messages.decode(line)
            except LocalqError as error:
                self.send(Failed(error.to_dict()))
                continue
            if isinstance(request, Cancel):
                self._cancelled.add(request.id)
            elif isinstance(request, Load | Generate | Profile | SaveCache | RestoreCache):
                self._inbox.put(request)
                if isinstance(request, Load):
                    threading.Thread(target=_read_ahead, args=[request.path], name="read-ahead", daemon=True).start()
            elif isinstance(request, Shutdown):
                break
            else:
                cause = f"{type(request).__name__} is not a valid request"
                self.send(Failed(LocalqError(PROCESS, cause, REPORT).to_dict()))
        os._exit(ExitCode.OK)  # at once, even within a step: the system frees the device

    def _skip_line(self, line: bytes) -> None:
        while line and not line.endswith(b"\n"):
            line = self._requests.readline(2**20)
        cause = f"the request is too large (limit: {messages.MAX_LINE_BYTES // 2**20} MiB)"
        self.send(Failed(LocalqError(PROCESS, cause, SHORTEN, ExitCode.USAGE).to_dict()))

    # ---- the work

    def serve(self, backend: Backend) -> None:
        """Answer requests forever."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        while True:
            request = self._inbox.get()
            id = None if isinstance(request, Load) else request.id
            try:
                if isinstance(request, Load):
                    self.send(backend.load(request, lambda *report: self.send(Loading(*report))))
                elif isinstance(request, Profile):
                    self._beat(backend.can_hang)
                    self.send(dataclasses.replace(backend.profile(request), id=request.id))
                elif isinstance(request, SaveCache):  # not watched: its time depends on the disk
                    self.send(dataclasses.replace(backend.save_cache(request), id=request.id))
                elif isinstance(request, RestoreCache):
                    self.send(dataclasses.replace(backend.restore_cache(request), id=request.id))
                else:
                    self._generate(request, backend)
            except LocalqError as error:
                self.send(Failed(error.to_dict(), id))
            except Exception as error:  # a bug must not end the process; its traceback goes to the log
                self._report_unexpected(error, id)
            else:
                continue
            finally:
                self._deadline = None
            if isinstance(request, Load):  # here the error, whose frames hold the model, is released
                self._unload(backend)

    def _unload(self, backend: Backend) -> None:
        """Free the memory of a failed load; where that fails too, the process ends."""
        try:
            backend.unload()
        except Exception as error:
            traceback.print_exc()
            self.die(LocalqError(GPU, f"memory could not be freed ({first_line(error)})"))

    def _generate(self, request: Generate, backend: Backend) -> None:
        batch: list[int] = []
        logprobs: list[TokenLogprob] = []
        stats, sent = Stats(), 0.0
        watched = backend.can_hang
        self._beat(watched)
        try:
            for step in backend.generate(request, lambda: request.id in self._cancelled):
                self._deadline = None  # sending may wait for a stopped front end (Ctrl-Z)
                batch += step.ids
                logprobs += step.logprobs
                stats = step.stats
                now = time.monotonic()
                if batch and (step.reason or now - sent >= BATCH_S):
                    self.send(Tokens(request.id, batch, stats, logprobs))
                    batch, logprobs, sent = [], [], now
                elif not step.ids and not step.reason:
                    self.send(Progress(request.id, stats))
                if step.reason:
                    self.send(Done(request.id, step.reason, stats))
                self._beat(watched)
        finally:
            if batch:  # generated before the failure: the front end gets them
                self.send(Tokens(request.id, batch, stats, logprobs))
            self._cancelled.discard(request.id)

    def _report_unexpected(self, error: Exception, id: int | None) -> None:
        traceback.print_exc()
        cause = f"{type(error).__name__}: {first_line(error)}"
        if is_device_fault(error):
            self.die(LocalqError(GPU, cause), id)
        failure = LocalqError("engine", cause, REPORT)
        if is_out_of_memory(error):
            failure = LocalqError(GPU, f"ran out of memory ({first_line(error)})", _LESS, ExitCode.DOES_NOT_FIT)
        self.send(Failed(failure.to_dict(), id))

    # ---- the watchdog

    def _beat(self, watched: bool) -> None:
        if watched:
            self._deadline = time.monotonic() + self._step_limit_s

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._step_limit_s / 4))
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                cause = f"no step finished within {self._step_limit_s:g} s"
                self.die(LocalqError(GPU, cause))

    def die(self, error: LocalqError, id: int | None = None) -> NoReturn:
        """Report `error`, and end the process. Without a step: the client knows whether a message follows."""
        self.send(Failed(error.to_dict(), id, dying=True))
        sys.stderr.flush()
        os._exit(ExitCode.FAILURE)


def _read_ahead(path: str) -> None:
    """Fetch the weights from the disk while torch is imported; at most half of the free RAM, so as to evict little."""
    from localq.planner import ram  # start-up cost: beside the import of torch

    model = Path(path)
    weights = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    disk.read_ahead(weights, ram.free_ram().bytes // 2)


def main(make_backend: Callable[[], Backend] = TorchBackend, step_limit_s: float = STEP_LIMIT_S) -> None:
    """Serve until stdin ends. Events take over stdout: fd 1 becomes stderr."""
    processes.end_with_parent()
    if processes.is_in_deleted_folder():
        os.chdir("/")  # nothing is read by a relative path, and torch needs a folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the front end, which sends Cancel or Shutdown
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    server = Server(sys.stdin.buffer, events, step_limit_s)
    server.send(Ready(os.getpid()))
    threading.Thread(target=server.read_requests, name="requests", daemon=True).start()
    try:
        processes.check_limits()
        backend = make_backend()
    except Exception as error:  # torch itself may fail to import: report it
        traceback.print_exc()
        if (known := error if isinstance(error, LocalqError) else processes.shortage(error)) is not None:
            server.die(known)
        cause = f"could not start ({type(error).__name__}: {error})"
        server.die(LocalqError(PROCESS, cause, DOCTOR, ExitCode.NO_DEVICE))
    try:
        server.serve(backend)
    finally:  # no orderly shutdown: Python aborts over the thread that waits on stdin
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(ExitCode.FAILURE)


if __name__ == "__main__":
    main()
