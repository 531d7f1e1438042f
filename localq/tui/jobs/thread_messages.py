"""How a thread that fetches or loads a model tells a screen about it: by messages, of which `post_message` is the door.

Knows no screen: the model picker's progress and the status line of a chat use the same watcher. Text of the hub, of
files and of the engine process is sanitized here, so that whoever draws it need not think of it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from textual.message import Message

from localq.chat.terminal.transfer_rate import ResumedBytes
from localq.errors import ExitCode, LocalqError
from localq.sanitize import sanitize

if TYPE_CHECKING:  # start-up cost: the one knows the hub
    from localq.wording import OnProgress
    from localq.worker.messages import Event

EVERY_S = 0.05  # between two messages of a transfer that goes on; a local disk would post thousands a second


class WatcherNotice(Message):
    """One line that the user must see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class Fetching(Message):
    """`what` (a file, a check) stands at `done` of `total` bytes of all files; total 0: nothing is counted.

    `here` of the bytes done were on this machine before.
    """

    def __init__(self, what: str, done: int, total: int, here: int = 0) -> None:
        super().__init__()
        self.what, self.done, self.total, self.here = what, done, total, here


class LoadingStage(Message):
    """The engine process loads: `stage` in words stands at `done` of `total` bytes; total 0: nothing is counted."""

    def __init__(self, stage: str, done: int, total: int) -> None:
        super().__init__()
        self.stage, self.done, self.total = stage, done, total


class StoppedError(LocalqError):
    """The user stopped it. Files that were being fetched keep what they have.

    A LocalqError because those pass through a transfer as they are, and any other exception is taken for a fault of it.
    """

    def __init__(self, name: str) -> None:
        next_step = "Opening it again goes on where this one was."
        super().__init__(name, "stopped", next_step, ExitCode.INTERRUPTED)


class PostingWatcher:
    """An `opening.Watcher` for a thread; `post` takes its messages and may be called from any thread.

    After `stop`, the next progress raises StoppedError in that thread. What may be silent for long is ended by what
    `at_stop` is set to (closing the engine process), in a thread of its own.
    """

    def __init__(self, post: Callable[[Message], object], every_s: float = EVERY_S) -> None:
        self._post, self._every_s = post, every_s
        self._stopped = threading.Event()
        self._name, self._what, self._posted_s = "", "", 0.0
        self._leaps = ResumedBytes()
        self.at_stop: Callable[[], None] | None = None

    @property
    def stopped(self) -> bool:
        """`stop` was called."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """End what goes on, from any thread. A transfer that stands still ends when the hub's watchdog ends it."""
        self._stopped.set()
        if self.at_stop is not None:
            threading.Thread(target=self.at_stop, daemon=True).start()

    def say(self, text: str) -> None:
        """A `Said`."""
        self._post(WatcherNotice(sanitize(text)))

    @contextlib.contextmanager
    def fetching(self, name: str) -> Iterator[OnProgress]:
        """Posts `Fetching`: every new `what`, every end, and of the bytes between them a few a second."""
        self._name, self._what, self._leaps = name, "", ResumedBytes()
        self._check()
        yield self._show
        self._check()

    def loading(self, event: Event) -> None:
        """A `LoadingStage`."""
        from localq.worker.messages import Loading  # start-up cost; whoever has an event has imported it

        self._check()
        if isinstance(event, Loading):
            self._post(LoadingStage(sanitize(event.stage), event.done_bytes, event.total_bytes))

    def _show(self, what: str, done: int, total: int) -> None:
        self._check()
        here = self._leaps.update(done, total)
        file, now_s = what.partition(",")[0], time.monotonic()
        if file != self._what or done >= total or now_s - self._posted_s >= self._every_s:
            self._what, self._posted_s = file, now_s
            self._post(Fetching(sanitize(what), done, total, here))

    def _check(self) -> None:
        if self.stopped:
            raise StoppedError(self._name)
