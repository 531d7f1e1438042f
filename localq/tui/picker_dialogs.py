"""What the model picker asks and tells on top of itself: whether to remove a model, and all that is known of one."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rich.cells import cell_len
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, ScrollableContainer, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from localq import model_facts
from localq.errors import LocalqError
from localq.local_models import LocalModel, paths_of
from localq.sanitize import sanitize
from localq.settings import Settings
from localq.tui.jobs import Job
from localq.tui.watching import PostingWatcher
from localq.wording import human_bytes

_CSS = Path(__file__).with_suffix(".tcss")


class RemoveScreen(ModalScreen[bool]):
    """Says what would be freed, and asks."""

    CSS_PATH = _CSS
    AUTO_FOCUS = "#keep"
    BINDINGS: ClassVar = [("escape,n", "answer(False)", "Keep it"), ("y", "answer(True)", "Remove it")]

    def __init__(self, model: LocalModel) -> None:
        super().__init__()
        paths = "\n".join(map(str, paths_of(model)))
        shared = "\nAnother tool put some of it there, and may use it." if model.shared else ""
        size = human_bytes(model.bytes)
        self._question = sanitize(f"Remove {model.name} ({model.format}) from this machine? {size} at most are freed.")
        self._paths = sanitize(f"{paths}{shared}")

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Static(self._question, classes="question", markup=False)
            yield Static(self._paths, markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Keep it (n)", id="keep", compact=True)
                yield Button("Remove it (y)", id="remove", compact=True)

    @on(Button.Pressed)
    def _pressed(self, message: Button.Pressed) -> None:
        message.stop()
        self.dismiss(message.button.id == "remove")

    def action_answer(self, yes: bool) -> None:
        """By a key."""
        self.dismiss(yes)


class DetailsScreen(ModalScreen[None]):
    """What `localq show` tells of a model."""

    CSS_PATH = _CSS
    BINDINGS: ClassVar = [("escape,q,i", "leave", "Back")]

    def __init__(self, name: str, settings: Settings) -> None:
        super().__init__()

        def work(watcher: PostingWatcher) -> list[str]:
            return model_facts.lines(model_facts.of_name(name, settings))

        self._job = Job(name, work, self.post_message)

    def compose(self) -> ComposeResult:
        with ScrollableContainer(classes="dialog", id="facts"):
            yield Static("Looking", id="lines", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Back (Esc)", id="back", compact=True)

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
        lines = [sanitize(each) for each in ([str(told)] if isinstance(told, LocalqError) else told)]
        shown = self.query_one("#lines", Static)
        if not isinstance(told, LocalqError):  # a table: it is scrolled, not wrapped
            shown.styles.width = max(map(cell_len, lines))
        shown.update("\n".join(lines))

    @on(Button.Pressed)
    def action_leave(self) -> None:
        """Back."""
        self.dismiss(None)
