"""`Ticket`: one job of the slot, as whoever submitted it sees it: what it yields, its place in the queue, cancel.

Items pass from the thread of the slot to an event loop or to another thread, through a buffer with a limit: who does
not read is dropped, because the engine waits for nobody.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from localq.errors import LocalqError

if TYPE_CHECKING:
    from localq.server.job_client import JobClient
    from localq.server.model import ModelRequest

T = TypeVar("T")
BUFFER_BYTES = 2**20  # of items that nobody has read yet
ITEM_BYTES = 200  # of an item without its text, about
_STEP = "Read the stream faster, or ask for a shorter reply."


class SlowReader(LocalqError):
    """The items were not read: more than BUFFER_BYTES of them waited."""

    def __init__(self) -> None:
        why = f"more than {BUFFER_BYTES // 2**20} MiB of the reply is unread"
        super().__init__("the client", why, _STEP)


class Ticket(Generic[T]):
    """A submitted job. Iterate it once, in an event loop (`async for`) or in a thread; its error is raised there.

    client   who submitted it, for the turns that clients take
    model    what the job wants loaded
    """

    def __init__(self, client: str, model: ModelRequest, job: Callable[[Any], Iterator[T]]) -> None:
        self.client, self.model, self.job = client, model, job
        self.place: Callable[[Ticket[T]], int] = lambda ticket: 0  # set by the slot, as the next
        self.withdraw: Callable[[Ticket[T]], None] = lambda ticket: None
        self._lock = threading.Condition()
        self._items: collections.deque[T] = collections.deque()
        self._bytes = 0
        self._ended, self._cancelled = False, False
        self._error: BaseException | None = None
        self._engine: JobClient | None = None
        self._wake: Callable[[], None] | None = None

    @property
    def position(self) -> int:
        """Jobs that run before this one, the running one included; 0: it runs, or has ended."""
        return self.place(self)

    @property
    def cancelled(self) -> bool:
        """True once `cancel` was called."""
        return self._cancelled

    @property
    def ended(self) -> bool:
        """True once nothing more is added; items may wait to be read."""
        return self._ended

    def cancel(self) -> None:
        """End the job, from any thread: a queued one at once, a running one within a step of the engine.

        A running job goes on until the engine's `Done` ("cancelled"), so that it can yield its end.
        """
        with self._lock:
            self._cancelled, engine = True, self._engine
        if engine is not None:
            engine.stop()
        else:
            self.withdraw(self)

    # ---- for the thread of the slot

    def begin(self, engine: JobClient) -> bool:
        """Start the job, over this client; False if it was cancelled before."""
        with self._lock:
            if not self._cancelled:
                self._engine = engine
            return not self._cancelled

    def put(self, item: T) -> None:
        """Add an item. Raises SlowReader where the buffer is full."""
        with self._lock:
            self._bytes += _size(item)
            if self._bytes > BUFFER_BYTES:
                raise SlowReader
            self._items.append(item)
            self._notify()

    def end(self, error: BaseException | None = None) -> None:
        """End the items; the reader gets `error` after those that wait. Only the first end counts."""
        with self._lock:
            if not self._ended:
                self._ended, self._error = True, error
            self._notify()

    def _notify(self) -> None:
        self._lock.notify_all()
        if self._wake is not None:
            self._wake()

    # ---- for the reader

    def _take(self) -> list[T] | None:
        """All items that wait; None at the end. Raises the job's error once they are read. Holds the lock."""
        items = list(self._items)
        self._items.clear()
        self._bytes = 0
        if items or not self._ended:
            return items
        if self._error is not None:
            raise self._error
        return None

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._items or self._ended)
                items = self._take()
            if items is None:
                return
            yield from items

    async def batches(self) -> AsyncIterator[list[T]]:
        """Lists of one or more items, all that wait at a time: a reader that lags gets longer ones."""
        loop, awake = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(awake.set)
            except RuntimeError:  # the loop is closed, so nobody reads
                self._wake = None

        with self._lock:
            self._wake = wake
        try:
            while True:
                awake.clear()
                with self._lock:
                    items = self._take()
                if items is None:
                    return
                if items:
                    yield items
                else:
                    await awake.wait()
        finally:
            with self._lock:
                self._wake = None

    async def __aiter__(self) -> AsyncIterator[T]:
        async for items in self.batches():
            for item in items:
                yield item


def _size(item: object) -> int:
    text = getattr(item, "text", item)
    return ITEM_BYTES + (4 * len(text) if isinstance(text, str) else 0)
