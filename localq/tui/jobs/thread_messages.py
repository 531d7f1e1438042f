"""Progress and notices of a thread that fetches or loads a model, as Textual messages.

The same watcher serves the opening screen and the status line. Text of the hub, of files and of the engine process is
sanitized here.
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
from localq.files.hub import pauses
from localq.sanitize import sanitize

if TYPE_CHECKING:  # start-up cost
    from localq.planner.consent import OpenCost
    from localq.wording import OnProgress
    from localq.worker.messages import Event

EVERY_S = 0.05  # between two progress messages; a local disk would post thousands a second


class WatcherNotice(Message):
    """A notice for the user."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class Fetching(Message):
    """`what` (a file, a check) is at `done` of `total` bytes of all files; total 0: not counted.

    here   bytes of `done` that were on disk before
    """

    def __init__(self, what: str, done: int, total: int, here: int = 0) -> None:
        super().__init__()
        self.what, self.done, self.total, self.here = what, done, total, here


class LoadingStage(Message):
    """The engine process loads: `stage` is at `done` of `total` bytes; total 0: not counted."""

    def __init__(self, stage: str, done: int, total: int) -> None:
        super().__init__()
        self.stage, self.done, self.total = stage, done, total


class StoppedError(LocalqError):
    """The user stopped it; partial files are kept.

    A LocalqError, because a transfer passes those on and treats other exceptions as its own faults.
    """

    def __init__(self, name: str) -> None:
        next_step = "Open the model again to resume."
        super().__init__(name, "stopped", next_step, ExitCode.INTERRUPTED)


class PostingWatcher:
    """A `Watcher` that posts messages; `post` may be called from any thread.

    After `stop`, the next progress event raises StoppedError in the working thread. at_stop: called in a thread of its
    own, to end work that may be silent for long (it closes the engine process).
    """

    def __init__(self, post: Callable[[Message], object], every_s: float = EVERY_S) -> None:
        self._post, self._every_s = post, every_s
        self._stopped = threading.Event()
        self._name, self._what, self._posted_s = "", "", 0.0
        self._leaps = ResumedBytes()
        self.at_stop: Callable[[], None] | None = None

    @property
    def stopped(self) -> bool:
        """True once `stop` was called."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Stop the work, from any thread. A stalled transfer ends at the hub's timeout."""
        self._stopped.set()
        if self.at_stop is not None:
            threading.Thread(target=self.at_stop, daemon=True).start()

    def say(self, text: str) -> None:
        """Post a notice."""
        self._post(WatcherNotice(sanitize(text)))

    def agree(self, cost: OpenCost) -> bool:
        """Raise ConsentError: the screen asks, and opens the model again."""
        from localq.planner.consent import ConsentError  # start-up cost

        raise ConsentError(cost)

    @contextlib.contextmanager
    def fetching(self, name: str) -> Iterator[OnProgress]:
        """Post `Fetching` for every new file, every end, and a few times a second between."""
        self._name, self._what, self._leaps = name, "", ResumedBytes()
        self._check()
        yield self._show
        self._check()

    @contextlib.contextmanager
    def pausing(self, why: str) -> Iterator[Callable[[float], None]]:
        """Post a pause before another request as progress (`pauses.Show`)."""

        def report(left_s: float) -> None:
            self._check()
            self._post(Fetching(sanitize(pauses.text(why, left_s)), 0, 0))

        yield report

    def loading(self, event: Event) -> None:
        """Post a `LoadingStage`."""
        from localq.worker.messages import Loading  # start-up cost

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
