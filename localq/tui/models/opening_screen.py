"""The screen of opening or fetching a model: stage, bytes, rate, time left; errors with retry."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from localq.chat.open_options import OpenOptions
from localq.errors import LocalqError
from localq.planner.consent import ConsentError
from localq.sanitize import sanitize
from localq.settings import Settings
from localq.tui.chat.status_line import SPINNER
from localq.tui.jobs import model_jobs
from localq.tui.jobs.job import Job
from localq.tui.jobs.model_jobs import ReadyModel
from localq.tui.jobs.thread_messages import Fetching, LoadingStage, PostingWatcher, StoppedError, WatcherNotice
from localq.tui.keys import active_key, bindings
from localq.tui.models.transfer_lines import BAR_CELLS, PERCENT_CELLS, TransferLines, bar
from localq.tui.terminal.terminal_app import TerminalScreen

T = TypeVar("T")
TICK_S = 0.5  # between two updates of a stalled transfer
SPIN_S = 0.1  # between two frames of the spinner
SCROLLBAR_CELLS = 2  # which may take its place after the bar is drawn


class JobScreen(TerminalScreen, ModalScreen["T | LocalqError"], Generic[T]):
    """Runs a job; dismisses with its result or LocalqError (StoppedError where the user stopped it)."""

    CSS_PATH = Path(__file__).with_suffix(".tcss")
    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings("opening_leave", priority=True),
        *bindings("opening_again"),
    ]

    def __init__(self, title: str, name: str) -> None:
        super().__init__()
        self._heading, self.name_wanted = sanitize(f"{title} {name}"), name
        self.error: LocalqError | None = None
        self._frames = itertools.cycle(SPINNER)
        self.agreed = False  # to a large download or quantization
        self._begin()

    def work(self, watcher: PostingWatcher) -> T:
        """The work, in a thread."""
        raise NotImplementedError

    def discard(self, made: T) -> None:
        """Discard a result that came after the user stopped the job."""

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="job"):
            yield Static(f"{SPINNER[0]} {self._heading}", id="title", markup=False)
            yield Static("", id="stage", markup=False)
            yield Static("", id="bar", markup=False)
            yield Static("", id="detail", markup=False)
            yield Static("", id="notices", markup=False)
            yield Static("", id="error", markup=False)
            with Horizontal(id="buttons"):
                yield Button("Stop", id="leave", compact=True)
                yield Button(f"Try again ({active_key(self, 'opening_again')})", id="again", compact=True)

    def on_mount(self) -> None:
        """Start the job."""
        self.set_interval(TICK_S, self._draw)
        self._spinner = self.set_interval(SPIN_S, self._spin)
        self._start()

    def on_unmount(self) -> None:
        """Abandon the job, so that the app can exit."""
        self._job.abandon()

    def _spin(self) -> None:
        """A spinner before the title while the job runs."""
        mark = "✗" if self.error is not None else next(self._frames)
        self.query_one("#title", Static).update(f"{mark} {self._heading}", layout=False)

    # ---- messages of the thread

    @on(Fetching)
    @on(LoadingStage)
    def _progress(self, message: Fetching | LoadingStage) -> None:
        message.stop()
        self._lines.update(message, time.monotonic())
        self._draw()

    @on(WatcherNotice)
    def _show_notice(self, message: WatcherNotice) -> None:
        message.stop()
        self._notices.append(message.text)
        self._draw()

    @on(Job.Ended)
    def _ended(self, message: Job.Ended) -> None:
        message.stop()
        if message.job is not self._job:
            return
        self._spinner.pause()
        outcome = self._job.take()
        if isinstance(outcome, ConsentError):
            self._ask(outcome)
            return
        if not isinstance(outcome, LocalqError) or isinstance(outcome, StoppedError):
            self.dismiss(outcome)
            return
        self.error = outcome
        self._spin()
        self._draw()
        self.query_one("#again", Button).focus()

    def _ask(self, error: ConsentError) -> None:
        from localq.tui.models.picker_dialogs import ConsentScreen  # start-up cost

        def answered(yes: bool | None) -> None:
            if yes:
                self.agreed = True
                self._begin()
                self._start()
            else:
                self.dismiss(StoppedError(self.name_wanted))

        self.app.push_screen(ConsentScreen(error.cost), answered)

    # ---- what the user does

    @on(Button.Pressed, "#leave")
    def action_leave(self) -> None:
        """Stop the job; when stopping already, or after an error, go back."""
        if self.error is not None:
            self.dismiss(self.error)
        elif self._job.watcher.stopped:
            self._job.abandon()
            self.dismiss(StoppedError(self.name_wanted))
        else:
            self._job.stop()
            self._draw()

    @on(Button.Pressed, "#again")
    def action_again(self) -> None:
        """Retry after an error; a fetch resumes."""
        if self.error is not None:
            self._begin()
            self._start()

    # ---- inside

    def _begin(self) -> None:
        self.error = None
        self._lines, self._notices = TransferLines(), list[str]()
        self._job = Job(self.name_wanted, self.work, self.post_message, self.discard)

    def _start(self) -> None:
        self._draw()
        self.query_one("#job").focus()  # not the stop button: a second Enter in the picker must not press it
        self._spinner.resume()
        self._job.start()

    def _draw(self) -> None:
        failed, stopping = self.error is not None, self._job.watcher.stopped
        lines = self._lines.lines(time.monotonic())
        leave = active_key(self, "opening_leave")
        stage = f"Stopping. Press {leave} again to go back without waiting." if stopping else lines.stage
        for name, text in (
            ("stage", "" if failed else stage), ("detail", "" if failed else lines.detail),
            ("notices", "\n".join(self._notices)), ("error", _words(self.error)),
        ):  # fmt: skip
            self._show(name, text)
        cells = max(4, min(BAR_CELLS, self.query_one("#job").content_size.width - PERCENT_CELLS - SCROLLBAR_CELLS))
        self._show("bar", Content() if failed else bar(lines.share, cells))
        self.query_one("#leave", Button).label = f"{'Back' if failed else 'Stop'} ({leave})"
        self.query_one("#again", Button).display = failed

    def _show(self, name: str, text: str | Content) -> None:
        shown = self.query_one(f"#{name}", Static)
        shown.display = bool(text)
        shown.update(text)


class OpeningScreen(JobScreen[ReadyModel]):
    """Opens and loads a model for a conversation."""

    def __init__(self, name: str, settings: Settings, wanted: OpenOptions) -> None:
        self._settings, self._wanted = settings, wanted
        super().__init__("Opening", name)

    def work(self, watcher: PostingWatcher) -> ReadyModel:
        """See `model_jobs.open_and_load`."""
        wanted = replace(self._wanted, agreed=self._wanted.agreed or self.agreed)
        return model_jobs.open_and_load(self.name_wanted, self._settings, wanted, watcher)

    def discard(self, made: ReadyModel) -> None:
        """End the engine process."""
        made.close()


class PullScreen(JobScreen[Path]):
    """Fetches a model without opening it."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._settings = settings
        super().__init__("Fetching", name)

    def work(self, watcher: PostingWatcher) -> Path:
        """See `model_jobs.pull`."""
        return model_jobs.pull(self.name_wanted, self._settings, watcher, self.agreed)


def _words(error: LocalqError | None) -> str:
    """Text of an error, with the next step in a paragraph of its own."""
    if error is None:
        return ""
    return sanitize(f"{error.what}: {error.why.rstrip('.')}." + (f"\n\n{error.next_step}" if error.next_step else ""))
