"""Long work of a screen in a thread that nobody has to wait for: opening a model, fetching one.

Not a worker of Textual, whose threads an app waits for when it ends: a transfer that stands still would hold the
terminal for as long as the hub's watchdog lets it. What such a job made and nobody took is given back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from textual.message import Message

from localq.errors import LocalqError
from localq.tui.jobs.thread_messages import PostingWatcher, StoppedError

T = TypeVar("T")


class Job(Generic[T]):
    """`work`, with a watcher, in a thread; `post` gets what the watcher posts, and last `Job.Ended`.

    discard  is given what was made where nobody takes it
    """

    class Ended(Message):
        """`job.take()` has the outcome."""

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
        self._error: BaseException | None = None

    def start(self) -> None:
        """Returns at once."""
        threading.Thread(target=self._run, name=f"job {self.name}", daemon=True).start()

    def stop(self) -> None:
        """It ends with a StoppedError as soon as it can."""
        self.watcher.stop()

    def abandon(self) -> None:
        """`stop`, and nobody will ask for what became of it."""
        self.stop()
        with self._guard:
            self._taken = True
            left, self._made = self._made, []
        for made in left:
            self._discard(made)

    def take(self) -> T | LocalqError:
        """What was made, or why not. Once it was stopped it is stopped, however far it came.

        Raises what was no expected failure: a bug must not vanish in a thread.
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
        if isinstance(self._error, LocalqError):
            return self._error
        raise self._error or AssertionError("it has not ended, or was taken before")

    def _run(self) -> None:
        made: list[T] = []
        try:
            made.append(self._work(self.watcher))
        except BaseException as error:  # raised again by `take`
            self._error = error
        with self._guard:
            abandoned = self._taken
            if not abandoned:
                self._made = made
        if abandoned:
            for each in made:
                self._discard(each)
        else:
            self._post(Job.Ended(self))
