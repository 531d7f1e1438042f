"""Long work of a screen in a thread that nobody has to wait for: opening a model, fetching one.

Not a worker of Textual, whose threads an app waits for when it ends: a transfer that stands still would hold the
terminal for as long as the hub's watchdog lets it. What such a job made and nobody took is given back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from textual.message import Message

from localq import hub, opening, prepare, pull_verdict
from localq.errors import LocalqError
from localq.opening import Opened, Wanted
from localq.settings import Settings
from localq.tui.watching import PostingWatcher, StoppedError
from localq.worker.messages import Loaded

T = TypeVar("T")


@dataclass(frozen=True)
class Opening:
    """A model that is open and loaded; whoever takes it closes it, which ends its engine process."""

    opened: Opened
    loaded: Loaded
    stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """More than once is fine."""
        self.stack.close()


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


def open_and_load(name: str, settings: Settings, wanted: Wanted, watcher: PostingWatcher) -> Opening:
    """`name`, ready for a conversation. Raises LocalqError as opening and loading do."""
    with ExitStack() as stack:
        opened = stack.enter_context(opening.open_session(name, settings, watcher, wanted))
        opening.check_converses(opened, name)
        watcher.at_stop = opened.client.close  # a load may say nothing for long
        loaded = opening.load_now(opened, watcher)
        watcher.at_stop = None
        return Opening(opened, loaded, stack.pop_all())


def pull(name: str, settings: Settings, watcher: PostingWatcher) -> Path:
    """`name` on this machine, as `localq pull` fetches it: what does not fit is refused. Raises LocalqError."""
    target, why = pull_verdict.chosen(name, settings)
    if why:
        watcher.say(why)
    asks = target.entry is not None or not settings.offline  # else what follows says that it is not here
    if hub.local_path(target) is None and asks:
        verdict = pull_verdict.verdict(target, settings, None, force=False)
        if verdict is not None and verdict.refusal is not None:
            raise verdict.refusal
        if verdict is not None:
            watcher.say(verdict.said)
    with watcher.fetching(target.name) as show:
        return prepare.model_path(target, watcher.say, show, settings.offline)
