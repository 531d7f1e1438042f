"""A model that is being opened, or fetched: stages, bytes, rate, time left; Esc stops it, an error says what to do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from localq.chat.open_model import OpenOptions
from localq.errors import LocalqError
from localq.sanitize import sanitize
from localq.settings import Settings
from localq.tui.jobs import model_jobs
from localq.tui.jobs.job import Job
from localq.tui.jobs.model_jobs import ReadyModel
from localq.tui.jobs.thread_messages import Fetching, LoadingStage, PostingWatcher, StoppedError, WatcherNotice
from localq.tui.keys import active_key, bindings
from localq.tui.models.transfer_lines import TransferLines, bar
from localq.tui.terminal.terminal_app import TerminalScreen

T = TypeVar("T")
TICK_S = 0.5  # between two looks at the clock, for what stands still


class JobScreen(TerminalScreen, ModalScreen["T | LocalqError"], Generic[T]):
    """Runs a job and dismisses with what it made, or with the LocalqError; StoppedError where the user stopped it."""

    CSS_PATH = Path(__file__).with_suffix(".tcss")
    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings("opening_leave", priority=True),
        *bindings("opening_again"),
    ]

    def __init__(self, title: str, name: str) -> None:
        super().__init__()
        self._heading, self.name_wanted = sanitize(f"{title} {name}"), name
        self.error: LocalqError | None = None
        self._begin()

    def work(self, watcher: PostingWatcher) -> T:
        """In a thread."""
        raise NotImplementedError

    def discard(self, made: T) -> None:
        """What was made after the user had stopped it."""

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="job"):
            yield Static(self._heading, id="title", markup=False)
            yield Static("", id="stage", markup=False)
            yield Static("", id="bar", markup=False)
            yield Static("", id="detail", markup=False)
            yield Static("", id="said", markup=False)
            yield Static("", id="error", markup=False)
            with Horizontal(id="buttons"):
                yield Button("Stop", id="leave", compact=True)
                yield Button(f"Try again ({active_key(self, 'opening_again')})", id="again", compact=True)

    def on_mount(self) -> None:
        """Start."""
        self.set_interval(TICK_S, self._draw)
        self._start()

    def on_unmount(self) -> None:
        """An app that ends does not wait."""
        self._job.abandon()

    # ---- what the thread tells

    @on(Fetching)
    @on(LoadingStage)
    def _progress(self, message: Fetching | LoadingStage) -> None:
        message.stop()
        self._lines.seen(message, time.monotonic())
        self._draw()

    @on(WatcherNotice)
    def _told(self, message: WatcherNotice) -> None:
        message.stop()
        self._said.append(message.text)
        self._draw()

    @on(Job.Ended)
    def _ended(self, message: Job.Ended) -> None:
        message.stop()
        if message.job is not self._job:
            return
        outcome = self._job.take()
        if not isinstance(outcome, LocalqError) or isinstance(outcome, StoppedError):
            self.dismiss(outcome)
            return
        self.error = outcome
        self._draw()
        self.query_one("#again", Button).focus()

    # ---- what the user does

    @on(Button.Pressed, "#leave")
    def action_leave(self) -> None:
        """Stop; where it is stopped already, or has failed, go back at once."""
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
        """What failed once more; what was fetched before is not fetched again."""
        if self.error is not None:
            self._begin()
            self._start()

    # ---- inside

    def _begin(self) -> None:
        self.error = None
        self._lines, self._said = TransferLines(), list[str]()
        self._job = Job(self.name_wanted, self.work, self.post_message, self.discard)

    def _start(self) -> None:
        self._draw()
        self.query_one("#job").focus()  # not what stops it: Enter, pressed twice where this was chosen, must not
        self._job.start()

    def _draw(self) -> None:
        failed, stopping = self.error is not None, self._job.watcher.stopped
        lines = self._lines.lines(time.monotonic())
        leave = active_key(self, "opening_leave")
        stage = f"Stopping. {leave} again does not wait for it." if stopping else lines.stage
        for name, text in (
            ("stage", "" if failed else stage), ("bar", "" if failed else bar(lines.share)),
            ("detail", "" if failed else lines.detail), ("said", "\n".join(self._said)),
            ("error", _words(self.error)),
        ):  # fmt: skip
            shown = self.query_one(f"#{name}", Static)
            shown.display = bool(text)
            shown.update(text)
        self.query_one("#leave", Button).label = f"{'Back' if failed else 'Stop'} ({leave})"
        self.query_one("#again", Button).display = failed


class OpeningScreen(JobScreen[ReadyModel]):
    """Opens and loads `name` for a conversation."""

    def __init__(self, name: str, settings: Settings, wanted: OpenOptions) -> None:
        self._settings, self._wanted = settings, wanted
        super().__init__("Opening", name)

    def work(self, watcher: PostingWatcher) -> ReadyModel:
        """See `jobs`."""
        return model_jobs.open_and_load(self.name_wanted, self._settings, self._wanted, watcher)

    def discard(self, made: ReadyModel) -> None:
        """End its engine process."""
        made.close()


class PullScreen(JobScreen[Path]):
    """Fetches `name` and opens nothing."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._settings = settings
        super().__init__("Fetching", name)

    def work(self, watcher: PostingWatcher) -> Path:
        """See `jobs`."""
        return model_jobs.pull(self.name_wanted, self._settings, watcher)


def _words(error: LocalqError | None) -> str:
    """What, why, and the next step in a paragraph of its own."""
    if error is None:
        return ""
    return sanitize(f"{error.what}: {error.why.rstrip('.')}." + (f"\n\n{error.next_step}" if error.next_step else ""))
