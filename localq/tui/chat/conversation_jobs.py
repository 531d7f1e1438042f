"""Jobs of a conversation: one reply, command or profile at a time uses the session, in a thread.

A job posts messages (`session_job`); a reply streams through a `ReplyBuffer`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from textual import work
from textual.containers import Vertical
from textual.message import Message

from localq.chat.terminal import error_log
from localq.tui.chat import session_job
from localq.tui.chat.reply_buffer import ReplyBuffer
from localq.tui.chat.session_job import SessionWork
from localq.tui.chat.status_line import READY
from localq.tui.jobs.model_handle import ModelHandle


class ConversationJobs(Vertical):
    """Runs jobs. busy: a job runs; it ends with `finish_job`, when its result is drawn."""

    class Doing(Message):
        """Changed fields of `status_line.Status`."""

        def __init__(self, **changes: Any) -> None:
            super().__init__()
            self.changes = changes

    class Free(Message):
        """No job runs, and the last one is drawn."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.model: ModelHandle | None = None
        self.busy = False
        self._feed: ReplyBuffer | None = None
        self._stop = threading.Event()
        self._profiling = False
        self._next: SessionWork | None = None  # started after the profile

    @property
    def is_profiling(self) -> bool:
        """True if the running job is a profile: another job may be started, and waits for it."""
        return self._profiling and self._next is None

    def profile(self, show: Callable[[dict[str, Any]], None], fail: Callable[[str], None]) -> None:
        """Profile a decode step while no job runs; a job started meanwhile waits."""
        if self.busy or self.model is None:
            fail("the model was busy")
            return
        self.busy = self._profiling = True
        self._profile(self.model, show, fail)

    @work(thread=True, group="session")
    def _profile(self, model: ModelHandle, show: Callable[[dict[str, Any]], None], fail: Callable[[str], None]) -> None:
        try:
            self.app.call_from_thread(show, model.profile())
        except Exception as error:
            self.app.call_from_thread(fail, str(error_log.unexpected("profile", error)))
        finally:
            self.post_message(session_job.JobEnded())

    def start(self, job: SessionWork) -> None:
        """Run `job` in a thread, if no other runs."""
        if self._profiling:
            self._next = job
            return
        if self.busy or self.model is None:
            why = "The model is not loaded yet." if self.model is None else "The model is busy; Esc stops it."
            self.notify(why, markup=False)
            return
        self.busy = True
        self._stop.clear()
        self._feed = ReplyBuffer()
        self._work(job, self.model, self._feed)

    @work(thread=True, group="session")
    def _work(self, job: SessionWork, model: ModelHandle, feed: ReplyBuffer) -> None:
        session_job.run(job, model, feed, self._stop, self.post_message)

    def stop_job(self) -> None:
        """Stop the job and keep its text; a second time kill the engine process, which the next message restarts."""
        model = self.model
        if model is None or not self.busy:
            return
        end = model.close if self._stop.is_set() else model.session.stop
        self._stop.set()
        self.post_message(self.Doing(stopping=True))
        threading.Thread(target=end, daemon=True).start()  # a pipe may be full: the screen must not wait

    def finish_job(self) -> None:
        """The job is drawn: start the one that waits."""
        self._feed = None
        self.busy = self._profiling = False
        self.post_message(self.Doing(doing=READY, stopping=False))
        self.post_message(self.Free())
        job, self._next = self._next, None
        if job is not None:
            self.start(job)

    @work(thread=True, group="side")
    def run_aside(self, job: Callable[[], str]) -> None:
        """Run something that does not use the session in a thread; show its notice."""
        try:
            self.app.call_from_thread(self.notify, job(), markup=False)
        except Exception as error:
            self.post_message(session_job.JobFailed(error_log.unexpected("chat", error)))
