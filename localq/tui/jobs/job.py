"""Long work of a screen in a daemon thread: opening a model, fetching one.

Not a Textual worker, because an app waits for worker threads at exit: a stalled transfer would hold the terminal until
the hub's timeout. A result that is not taken is discarded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from textual.message import Message

from localq.chat.terminal import error_log
from localq.errors import LocalqError
from localq.files.hub import pauses
from localq.tui.jobs.thread_messages import PostingWatcher, StoppedError

T = TypeVar("T")


class Job(Generic[T]):
    """Runs `work` with a watcher in a thread; `post` gets the watcher's messages, and `Job.Ended` last.

    discard  called with a result that is not taken
    """

    class Ended(Message):
        """The job has ended; `job.take()` returns the result."""

        def __init__(self, job: Job[T]) -> None:
            super().__init__()
            self.job = job

    def __init__(
        self,
        name: str,
        work: Callable[[PostingWatcher], T],
        post: Callable[[Message], object],
        discard: Callable[[T], object] = lambda made: None,
    ) -> None:
        self.name, self.watcher = name, PostingWatcher(post)
        self._work, self._post, self._discard = work, post, discard
        self._guard, self._taken = threading.Lock(), False
        self._made: list[T] = []
        self._error: LocalqError | None = None

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name=f"job {self.name}", daemon=True).start()

    def stop(self) -> None:
        """Ask the job to end; its result is StoppedError."""
        self.watcher.stop()

    def abandon(self) -> None:
        """Stop the job and discard its result."""
        self.stop()
        with self._guard:
            self._taken = True
            left, self._made = self._made, []
        for made in left:
            self._discard(made)

    def take(self) -> T | LocalqError:
        """Return the result or the LocalqError; StoppedError once stopped, whatever the progress.

        Any other exception of the thread is in the log, and the LocalqError names it.
        """
        with self._guard:
            self._taken = True
            left, self._made = self._made, []
        if self.watcher.stopped:
            for made in left:
                self._discard(made)
            return StoppedError(self.name)
        if left:
            return left[0]
        why = "the job is still running, or its result has already been collected"
        return self._error or LocalqError(self.name, why)

    def _run(self) -> None:
        made: list[T] = []
        try:
            with pauses.shown_by(self.watcher.pausing):
                made.append(self._work(self.watcher))
        except BaseException as error:  # returned by `take`
            self._error = error_log.unexpected(self.name, error)
        with self._guard:
            abandoned = self._taken
            if not abandoned:
                self._made = made
        if abandoned:
            for each in made:
                self._discard(each)
        else:
            self._post(Job.Ended(self))
