"""Dialogs of the model picker: delete and force confirmations, and the details of a model."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from localq.errors import LocalqError
from localq.files.local_models import LocalModel
from localq.files.removal import bytes_freed, paths_of
from localq.planner import model_facts
from localq.planner.consent import OpenCost
from localq.sanitize import sanitize
from localq.settings import Settings
from localq.tui.instruments.memory_bar import KINDS
from localq.tui.jobs.job import Job
from localq.tui.jobs.thread_messages import PostingWatcher
from localq.tui.keys import active_key, bindings
from localq.tui.models.picker_rows import PickerRow
from localq.tui.terminal.terminal_app import TerminalScreen
from localq.wording import human_bytes

_CSS = Path(__file__).with_suffix(".tcss")


class QuestionScreen(TerminalScreen, ModalScreen[bool | None]):
    """A question with details and two answers, or three; "no" has the focus. The third answer returns None."""

    CSS_PATH = _CSS
    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar = [*bindings("question_yes", "question_no", "question_other")]

    def __init__(self, question: str, known: str, yes: str, no: str, other: str = "") -> None:
        super().__init__()
        self._other = other
        self._question, self._known, self._yes, self._no = sanitize(question), sanitize(known), yes, no

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Static(self._question, classes="question", markup=False)
            yield Static(self._known, markup=False)
            with Horizontal(classes="buttons"):
                yield Button(f"{self._no} ({active_key(self, 'question_no')})", id="no", compact=True)
                yield Button(f"{self._yes} ({active_key(self, 'question_yes')})", id="yes", compact=True)
                if self._other:
                    yield Button(f"{self._other} ({active_key(self, 'question_other')})", id="other", compact=True)

    @on(Button.Pressed)
    def _pressed(self, message: Button.Pressed) -> None:
        message.stop()
        self.dismiss({"yes": True, "no": False, "other": None}[message.button.id or "no"])

    def action_yes(self) -> None:
        """Answer yes."""
        self.dismiss(True)

    def action_no(self) -> None:
        """Answer no."""
        self.dismiss(False)

    def action_other(self) -> None:
        """Give the third answer, if there is one."""
        if self._other:
            self.dismiss(None)


class RemoveScreen(QuestionScreen):
    """Confirms deleting a model; lists its files."""

    def __init__(self, model: LocalModel) -> None:
        paths = "\n".join(paths_of(model))
        shared = "\nAnother tool downloaded some of these files and may still need them." if model.shared else ""
        size = human_bytes(bytes_freed(model))
        question = f"Delete {model.name} ({model.format}) from disk? This frees up to {size}."
        super().__init__(question, f"{paths}{shared}", "Delete", "Keep")


class ForceScreen(QuestionScreen):
    """Confirms opening a model that does not fit, with the reason."""

    def __init__(self, row: PickerRow) -> None:
        question = f"Open {row.full_name} even though the plan says it does not fit?"
        risk = "It may run out of memory, either while loading or later."
        super().__init__(question, f"Plan: {row.verdict}; {row.why}.\n{row.place}. {risk}", "Open", "Cancel")


class ConsentScreen(QuestionScreen):
    """Asks before a large download or quantization: size, time, place and alternative.

    built_in   the small model to offer beside it, if there is one
    """

    def __init__(self, cost: OpenCost, built_in: str = "") -> None:
        super().__init__(cost.title, "\n".join(cost.lines()), "Start", "Cancel", built_in and f"Use {built_in}")


class DetailsScreen(TerminalScreen, ModalScreen[None]):
    """Details of a model, as `localq show`."""

    CSS_PATH = _CSS
    BINDINGS: ClassVar = [*bindings("details_leave")]

    def __init__(self, name: str, settings: Settings) -> None:
        super().__init__()

        def work(watcher: PostingWatcher) -> dict[str, Any]:
            return model_facts.of_name(name, settings)

        self._job, self._title = Job(name, work, self.post_message), sanitize(name)
        self._lines: list[str] = []

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", id="facts") as shown:
            shown.border_title = Content(f"Details of {self._title}")
            shown.border_subtitle = f"{active_key(self, 'details_leave')} back"
            yield Static("Reading files", id="lines", markup=False)
            with Horizontal(classes="buttons"):
                yield Button(f"Back ({active_key(self, 'details_leave')})", id="back", compact=True)

    def on_mount(self) -> None:
        """Read the files in a thread."""
        self.query_one("#facts").focus()
        self._job.start()

    def on_unmount(self) -> None:
        """Abandon the job, so that the app can exit."""
        self._job.abandon()

    @on(Job.Ended)
    def _ended(self, message: Job.Ended) -> None:
        message.stop()
        outcome = self._job.take()
        if isinstance(outcome, LocalqError):
            self.query_one("#lines", Static).update(sanitize(str(outcome)))
        else:
            self._lines = [sanitize(each) for each in details(outcome)]
            self._draw()

    def on_resize(self) -> None:
        """Wrap for the new width."""
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        """Draw the lines, wrapped."""
        if not self._lines or not self.query("#facts"):  # none while the screen is closing
            return
        room = self.query_one("#facts").scrollable_content_region.width
        facts = list(itertools.takewhile(bool, self._lines))
        lines = [line for fact in facts for line in _wrap(fact, room)]
        for line in self._lines[len(facts) :]:
            lines += textwrap.wrap(line, max(room, 10), subsequent_indent="    ", break_on_hyphens=False) or [""]
        self.query_one("#lines", Static).update("\n".join(lines))

    @on(Button.Pressed)
    def action_leave(self) -> None:
        """Close."""
        self.dismiss(None)


def details(facts: dict[str, Any]) -> list[str]:
    """The lines of `model_facts.lines`, with memory in the words of the instruments, and a line for each source."""
    memory = facts["memory"]
    if memory is not None:
        measured, predicted = memory["measured_bytes"], _by_kind(memory["predicted_bytes"])
        if measured:
            memory = {**memory, "measured_bytes": _by_kind(measured), "predicted_bytes": predicted}
        else:
            memory = {**memory, "predicted_bytes": {**predicted, "total": sum(predicted.values())}}
    lines = model_facts.lines({**facts, "memory": memory, "sources": []})
    return [*lines, "", "published as:", *map(_source, facts["sources"])] if facts["sources"] else lines


def _by_kind(components: dict[str, int]) -> dict[str, int]:
    """Bytes by the parts of memory that the instruments name; a component of none keeps its name."""
    names = {component: kind.name for kind in KINDS for component in kind.components}
    found: dict[str, int] = {}
    for component, size in components.items():
        name = names.get(component, component)
        found[name] = found.get(name, 0) + size
    return found


def _source(source: dict[str, Any]) -> str:
    form = " ".join(filter(None, (source["format"], source["scheme"])))
    size = human_bytes(source["bytes"]) if source["bytes"] else ""
    marks = "gated" if source["gated"] else "", "" if source["verified"] else "not verified"
    parts = source["from"], source["revision"][:12], size, source["licence"] or "", *marks
    here = "on this machine" if source["path"] else "not on this machine"
    return f"  {form}: {', '.join(filter(None, (*parts, here)))}"


def _wrap(fact: str, room: int) -> list[str]:
    """A name and its value, wrapped below its beginning."""
    name, value = fact[: model_facts.NAME_CELLS], fact[model_facts.NAME_CELLS :]
    first, *more = textwrap.wrap(value, max(room - len(name), 10), break_on_hyphens=False) or [""]
    return [name + first, *(" " * len(name) + each for each in more)]
