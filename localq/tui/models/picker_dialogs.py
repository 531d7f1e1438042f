"""What the model picker asks and tells on top of itself: whether to remove or to force a model, and all known of it."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import ClassVar

from rich.cells import cell_len
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, ScrollableContainer, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from localq.errors import LocalqError
from localq.files.local_models import LocalModel, paths_of
from localq.planner import model_facts
from localq.sanitize import sanitize
from localq.settings import Settings
from localq.tui.jobs.job import Job
from localq.tui.jobs.thread_messages import PostingWatcher
from localq.tui.keys import active_key, bindings
from localq.tui.models.picker_rows import PickerRow
from localq.tui.terminal.terminal_app import TerminalScreen
from localq.wording import human_bytes

_CSS = Path(__file__).with_suffix(".tcss")


class QuestionScreen(TerminalScreen, ModalScreen[bool]):
    """A question, what there is to know of it, and two answers; no is the one in focus."""

    CSS_PATH = _CSS
    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar = [*bindings("question_yes", "question_no")]

    def __init__(self, question: str, known: str, yes: str, no: str) -> None:
        super().__init__()
        self._question, self._known, self._yes, self._no = sanitize(question), sanitize(known), yes, no

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Static(self._question, classes="question", markup=False)
            yield Static(self._known, markup=False)
            with Horizontal(classes="buttons"):
                yield Button(f"{self._no} ({active_key(self, 'question_no')})", id="no", compact=True)
                yield Button(f"{self._yes} ({active_key(self, 'question_yes')})", id="yes", compact=True)

    @on(Button.Pressed)
    def _pressed(self, message: Button.Pressed) -> None:
        message.stop()
        self.dismiss(message.button.id == "yes")

    def action_yes(self) -> None:
        """By a key."""
        self.dismiss(True)

    def action_no(self) -> None:
        """By a key."""
        self.dismiss(False)


class RemoveScreen(QuestionScreen):
    """Says what would be freed, and asks."""

    def __init__(self, model: LocalModel) -> None:
        paths = "\n".join(map(str, paths_of(model)))
        shared = "\nAnother tool put some of it there, and may use it." if model.shared else ""
        size = human_bytes(model.bytes)
        question = f"Remove {model.name} ({model.format}) from this machine? {size} at most are freed."
        super().__init__(question, f"{paths}{shared}", "Remove it", "Keep it")


class ForceScreen(QuestionScreen):
    """Says why the plan advises against it, and asks."""

    def __init__(self, row: PickerRow) -> None:
        question = f"Open {row.full_name} although the plan says that it does not fit?"
        risk = "Memory may be short while it loads, or later."
        super().__init__(question, f"The plan: {row.verdict}; {row.why}.\n{row.place}. {risk}", "Open it", "Leave it")


class DetailsScreen(TerminalScreen, ModalScreen[None]):
    """What `localq show` tells of a model."""

    CSS_PATH = _CSS
    BINDINGS: ClassVar = [*bindings("details_leave")]

    def __init__(self, name: str, settings: Settings) -> None:
        super().__init__()

        def work(watcher: PostingWatcher) -> list[str]:
            return model_facts.lines(model_facts.of_name(name, settings))

        self._job = Job(name, work, self.post_message)
        self._lines: list[str] = []

    def compose(self) -> ComposeResult:
        with ScrollableContainer(classes="dialog", id="facts"):
            yield Static("Looking", id="lines", markup=False)
            with Horizontal(classes="buttons"):
                yield Button(f"Back ({active_key(self, 'details_leave')})", id="back", compact=True)

    def on_mount(self) -> None:
        """Its files are read in a thread."""
        self.query_one("#facts").focus()
        self._job.start()

    def on_unmount(self) -> None:
        """An app that ends does not wait."""
        self._job.abandon()

    @on(Job.Ended)
    def _ended(self, message: Job.Ended) -> None:
        message.stop()
        told = self._job.take()
        if isinstance(told, LocalqError):
            self.query_one("#lines", Static).update(sanitize(str(told)))
        else:
            self._lines = [sanitize(each) for each in told]
            self._draw()

    def on_resize(self) -> None:
        """Facts for this width."""
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        """Facts in as many lines as they need; tables behind them are scrolled, not wrapped."""
        if not self._lines or not self.query("#facts"):  # the latter where the screen is just being left
            return
        room = self.query_one("#facts").scrollable_content_region.width
        facts = list(itertools.takewhile(bool, self._lines))
        lines = [line for fact in facts for line in _wrapped(fact, room)] + self._lines[len(facts) :]
        shown = self.query_one("#lines", Static)
        shown.styles.width = max(map(cell_len, lines))
        shown.update("\n".join(lines))

    @on(Button.Pressed)
    def action_leave(self) -> None:
        """Back."""
        self.dismiss(None)


def _wrapped(fact: str, room: int) -> list[str]:
    """A name and a value, which goes on below its beginning."""
    name, value = fact[: model_facts.NAME_CELLS], fact[model_facts.NAME_CELLS :]
    first, *more = textwrap.wrap(value, max(room - len(name), 10), break_on_hyphens=False) or [""]
    return [name + first, *(" " * len(name) + each for each in more)]
