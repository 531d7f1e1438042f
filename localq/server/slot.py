"""The slot: one engine, many requests. Jobs wait in a fair queue, and one thread runs them.

turns     Clients take turns; jobs of one client run in their order. Jobs of the model that is loaded go first, until
          one of another model has waited SWITCH_S
limit     `submit` raises QueueFull beyond `limit` waiting jobs; one client leaves some places to others
models    A job of another model than the loaded one switches to it. Who submits decides what may be asked for
idle      After `keep_alive_s` without a job the engine process is ended; the next job loads the model again
faults    Where the engine process dies, the running job and all that wait get the error: no reply is made by a process
          that nobody has looked at. The next one starts a new process, as `worker.recovery` permits

HTTP handlers and the socket of the user (`run`, `chat`, `ps`) use the same slot.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from localq.chat import open_model
from localq.chat.open_model import OpenSession, Watcher
from localq.errors import LocalqError
from localq.server.job_client import JobClient
from localq.server.model import ModelRequest, OpenModel
from localq.server.ticket import Ticket

if TYPE_CHECKING:
    from localq.worker.messages import Loaded

T = TypeVar("T")
QUEUE_LIMIT = 32  # jobs that wait
SHARE = 3 / 4  # of these, at most of one client
SWITCH_S = 20.0  # a job of another model waits so long for those of the loaded one
STOP_S = 2.0  # to end a job after its cancel
REPORT = "Report this as a bug."


class QueueFull(LocalqError):
    """The queue has reached its limit: ask again later."""


class SlotClosed(LocalqError):
    """The server is being stopped: no job is accepted, and what runs is ended."""

    def __init__(self) -> None:
        super().__init__("server", "shutting down", "Try again once the engine is running.")


@dataclass(frozen=True)
class SlotState:
    """The state of the slot. Times in seconds since 1970.

    model    name of the model, also while it is unloaded; None before the first one
    loaded   it is in memory; None: not now
    since    of the load, 0 before one
    busy     a job runs; loading: a model is being loaded
    queued   jobs that wait
    unloads_at  when the model will be unloaded if nothing comes; None: not planned
    pid      of the engine process
    """

    model: str | None
    loaded: Loaded | None
    since: float
    busy: bool
    loading: bool
    queued: int
    unloads_at: float | None
    pid: int | None


Opener = Callable[[ModelRequest, Watcher], contextlib.AbstractContextManager[OpenSession]]


def open_request(request: ModelRequest, watcher: Watcher) -> contextlib.AbstractContextManager[OpenSession]:
    """Find the model, and start its engine process (`open_model.open_session`)."""
    own = dataclasses.replace(request.wanted, fresh=True)  # not that of another server, nor of this one
    return open_model.open_session(request.name, request.settings, watcher, own)


class _Held:
    """The model that the slot has open: its tokenizer stays while the engine process is ended."""

    def __init__(self, request: ModelRequest, watcher: Watcher, opener: Opener) -> None:
        self.request, self.watcher, self._stack = request, watcher, contextlib.ExitStack()
        self.opened = self._stack.enter_context(opener(request, watcher))
        self.loaded: Loaded | None = None
        self.since = 0.0

    def load(self) -> Loaded:
        if self.loaded is None or not self.opened.client.alive:
            self.loaded = None
            self.opened.session.loaded = None
            self.loaded = open_model.load_now(self.opened, self.watcher)
            self.since = time.time()
        return self.loaded

    def unload(self) -> None:
        self.loaded = None
        self.opened.client.close()

    def close(self) -> None:
        self.loaded = None
        self._stack.close()

    def model(self, client: JobClient, loaded: Loaded) -> OpenModel:
        session = self.opened.session
        return OpenModel(
            loaded.name, session.tokenizer, client, loaded, session.sampling, self.request.settings, session.request,
            session.max_tokens,
        )  # fmt: skip


class Slot:
    """See the module. `open` loads a first model with progress; `submit` from any thread; `close` at the end."""

    def __init__(
        self,
        watcher: Watcher,
        keep_alive_s: float | None = None,
        limit: int = QUEUE_LIMIT,
        opener: Opener = open_request,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """watcher: shows loads that a job causes; it must not ask. keep_alive_s None: the model stays loaded."""
        self._watcher, self._keep_alive_s, self._limit = watcher, keep_alive_s, limit
        self._opener, self._clock = opener, clock
        self._changed = threading.Condition()
        self._queue: collections.OrderedDict[str, collections.deque[_Waiting]] = collections.OrderedDict()
        self._running: Ticket[Any] | None = None
        self._held: _Held | None = None
        self._loading = self._closing = False
        self._idle_since = clock()
        self._thread = threading.Thread(target=self._serve, name="slot", daemon=True)

    def open(self, request: ModelRequest, watcher: Watcher) -> Loaded:
        """Open and load a first model in this thread, with progress in `watcher`; then jobs run."""
        held = _Held(request, watcher, self._opener)
        try:
            loaded = held.load()
        except BaseException:
            held.close()
            raise
        held.watcher = self._watcher
        self._held = held
        self.start()
        return loaded

    def start(self) -> None:
        """Run jobs, without a model so far."""
        self._idle_since = self._clock()
        self._thread.start()

    def submit(self, client: str, model: ModelRequest, job: Callable[[OpenModel], Iterator[T]]) -> Ticket[T]:
        """Queue a job. It runs in the thread of the slot; what it yields is read from the ticket.

        Raises QueueFull, and SlotClosed after `close`.
        """
        ticket = Ticket(client, model, job)
        ticket.place, ticket.withdraw = self._place, self._withdraw
        with self._changed:
            if self._closing:
                raise SlotClosed
            if self._queued() >= self._limit:
                raise QueueFull("the queue", f"{self._limit} requests are already waiting", "Try again later.")
            if (own := len(self._queue.get(client, ()))) >= self._limit * SHARE:
                raise QueueFull("the queue", f"{own} requests from this client are already waiting", "Try again later.")
            self._queue.setdefault(client, collections.deque()).append(_Waiting(ticket, self._clock()))
            self._changed.notify_all()
        return ticket

    def state(self) -> SlotState:
        """The current state."""
        with self._changed:
            held, queued, busy = self._held, self._queued(), self._running is not None
            loaded = held.loaded if held is not None and held.opened.client.alive else None
            deadline = self._deadline() if loaded is not None and not busy and not queued else None
            unloads_at = None if deadline is None else time.time() + max(0.0, deadline - self._clock())
            return SlotState(
                held.opened.session.record.model if held else None, loaded, held.since if held and loaded else 0.0,
                busy, self._loading, queued, unloads_at, held.opened.client.pid if held else None,
            )  # fmt: skip

    @property
    def model(self) -> OpenModel | None:
        """The open model without replies, also while it is unloaded: for its tokenizer. None while none is open."""
        held = self._held
        if held is None or (loaded := held.opened.session.loaded or held.loaded) is None:
            return None
        return held.model(JobClient(held.opened.client), loaded)

    @property
    def request(self) -> ModelRequest | None:
        """The request of the model that is open."""
        return self._held.request if self._held is not None else None

    def drain(self, drain_s: float) -> None:
        """Accept nothing more, end what waits (`SlotClosed`), and cancel what runs after `drain_s`. Returns at once."""
        with self._changed:
            begun, self._closing = self._closing, True
            waiting = self._take_all()
            self._changed.notify_all()
        for ticket in waiting:
            ticket.end(SlotClosed())
        if not begun:
            threading.Thread(target=self._cancel_after, args=[drain_s], name="drain", daemon=True).start()

    def _cancel_after(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._running is None, seconds)
            running = self._running
        if running is not None:
            self._cut(running)

    def cut(self) -> None:
        """Cancel what runs, at once; callable from a signal handler."""
        if (running := self._running) is not None:
            threading.Thread(target=self._cut, args=[running], name="cut", daemon=True).start()

    def _cut(self, ticket: Ticket[Any]) -> None:
        ticket.end(SlotClosed())
        ticket.cancel()

    def close(self, drain_s: float = 10.0) -> None:
        """End all jobs, those that run after `drain_s`, and the engine process; idempotent."""
        self.drain(drain_s)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(drain_s + STOP_S)
        if (held := self._held) is not None:
            held.close()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    # ---- the queue; all hold the lock

    def _queued(self) -> int:
        return sum(map(len, self._queue.values()))

    def _take_all(self) -> list[Ticket[Any]]:
        found = [each.ticket for jobs in self._queue.values() for each in jobs]
        self._queue.clear()
        return found

    def _choose(self) -> Ticket[Any] | None:
        """The next job, taken from the queue: of the client whose turn it is, among those that need no switch first."""
        held, now = self._held, self._clock()
        heads = [(client, jobs[0]) for client, jobs in self._queue.items()]
        if not heads:
            return None
        same = [each for each in heads if held is None or each[1].ticket.model.same_load(held.request)]
        overdue = [each for each in heads if each not in same and now - each[1].since >= SWITCH_S]
        client, waiting = min(overdue, key=lambda each: each[1].since) if overdue else (same or heads)[0]
        jobs = self._queue.pop(client)
        jobs.popleft()
        if jobs:
            self._queue[client] = jobs  # at the end: the others come first
        return waiting.ticket

    def _place(self, ticket: Ticket[Any]) -> int:
        with self._changed:
            rounds = [(place, turn) for turn, jobs in enumerate(self._queue.values()) for place in range(len(jobs))]
            found = [
                (place, turn)
                for turn, jobs in enumerate(self._queue.values())
                for place, each in enumerate(jobs)
                if each.ticket is ticket
            ]
            return sum(each <= found[0] for each in rounds) if found else 0

    def _withdraw(self, ticket: Ticket[Any]) -> None:
        with self._changed:
            for client, jobs in list(self._queue.items()):
                left = collections.deque(each for each in jobs if each.ticket is not ticket)
                if len(left) != len(jobs):
                    self._queue[client] = left
                    if not left:
                        del self._queue[client]
                    break
        if ticket is not self._running:
            ticket.end()

    def _deadline(self) -> float | None:
        return None if self._keep_alive_s is None else self._idle_since + self._keep_alive_s

    # ---- the thread

    def _serve(self) -> None:
        while self._wait():
            ticket = self._running
            if ticket is None:
                self._unload()
            else:
                self._run(ticket)
                with self._changed:
                    self._running, self._idle_since = None, self._clock()
                    self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for a job, which is then `_running`, or for the time to unload; False at the end."""
        with self._changed:
            while not self._closing:
                self._running = self._choose()
                if self._running is not None:
                    return True
                loaded = self._held is not None and self._held.loaded is not None
                deadline = self._deadline() if loaded else None
                left = None if deadline is None else deadline - self._clock()
                if left is not None and left <= 0:
                    return True
                self._changed.wait(left)
            return False

    def _unload(self) -> None:
        if (held := self._held) is not None:
            self._watcher.say(f"{held.opened.session.record.model}: unloaded after being idle")
            held.unload()

    def _run(self, ticket: Ticket[Any]) -> None:
        try:
            self._stream(ticket)
        except LocalqError as error:
            ticket.end(error)
            self._check_engine(error)
        except Exception as error:  # a bug must not end the thread; the others still get replies
            traceback.print_exc()
            ticket.end(LocalqError("server", f"internal error ({type(error).__name__}); see the server log", REPORT))
        else:
            ticket.end()

    def _stream(self, ticket: Ticket[Any]) -> None:
        held = self._hold(ticket.model)
        loaded = self._load(held)
        client = JobClient(held.opened.client)
        if not ticket.begin(client):
            return
        items = ticket.job(held.model(client, loaded))
        try:
            for item in items:
                ticket.put(item)
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()  # a reply that is not read to its end is cancelled

    def _hold(self, request: ModelRequest) -> _Held:
        held = self._held
        if held is not None and held.request.same_load(request):
            return held
        if held is not None:
            self._watcher.say(f"switching from {held.request.name} to {request.name}")
            held.close()  # first: both may not fit
            self._held = None
        with self._load_shown():
            self._held = _Held(request, self._watcher, self._opener)
        return self._held

    def _load(self, held: _Held) -> Loaded:
        with self._load_shown() if held.loaded is None else contextlib.nullcontext():
            return held.load()

    @contextlib.contextmanager
    def _load_shown(self) -> Iterator[None]:
        self._loading = True
        try:
            yield
        finally:
            self._loading = False

    def _check_engine(self, error: LocalqError) -> None:
        """After a failed job: where the engine process has died, the jobs that wait get the error too."""
        held = self._held
        if held is None or held.loaded is None or held.opened.client.alive:
            return
        held.loaded = None
        with self._changed:
            waiting = self._take_all()
        for ticket in waiting:
            ticket.end(error)


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A job in the queue, and since when (of the clock)."""

    ticket: Ticket[Any]
    since: float
