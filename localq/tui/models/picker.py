"""The model picker: models on disk and models that fit the card, with the verdict of `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Container, VerticalScroll
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input, Static

from localq import places
from localq.errors import LocalqError
from localq.files import catalog, removal
from localq.files.local_models import LocalModel
from localq.sanitize import sanitize
from localq.settings import OF_LOAD, Settings
from localq.tui.jobs.job import Job
from localq.tui.jobs.thread_messages import PostingWatcher, StoppedError, WatcherNotice
from localq.tui.key_line import KeyLine
from localq.tui.keys import active_key, bindings
from localq.tui.models import model_card, picker_rows
from localq.tui.models.picker_rows import ORDERS, PickerRow
from localq.tui.models.picker_table import FilterInput, ModelTable
from localq.tui.terminal.terminal_app import TerminalScreen
from localq.wording import human_bytes

if TYPE_CHECKING:
    from localq.tui.models.picker_plans import Outlook


BESIDE = 150  # columns from which the details are beside the list
ABOUT_CELLS = 42  # of the details, without their border
FILTER_KEYS = ("picker_leave", "picker_open", "picker_list")
LIST_KEYS = (
    "picker_leave", "picker_open", "picker_details", "picker_pull", "picker_every", "picker_sort", "picker_filter",
    "picker_delete", "picker_force",
)  # fmt: skip


@dataclass(frozen=True)
class PickedModel:
    """The model to open: its name, format, and whether to load it although the plan says it does not fit."""

    name: str
    format: str | None
    force: bool = False


@dataclass(frozen=True)
class _Plans:
    outlook: Outlook
    rows: list[PickerRow]


class PickerScreen(TerminalScreen, Screen["PickedModel | None"]):
    """Dismisses with the chosen model, or None."""

    # No CSS_PATH: for a CSS file of a screen, Textual parses all CSS again and restyles every widget.
    DEFAULT_CSS = Path(__file__).with_suffix(".tcss").read_text(encoding="utf-8")
    AUTO_FOCUS = "#filter"
    BINDINGS: ClassVar = [*bindings("picker_leave")]
    HORIZONTAL_BREAKPOINTS = [(0, "-below"), (BESIDE, "-beside")]  # noqa: RUF012 - as its base has it

    class Drawn(Message):
        """The first frame is drawn."""

    def __init__(self, settings: Settings, decided: Mapping[str, str] | None = None) -> None:
        """decided: settings in force that a project's file has decided; those of a plan are named."""
        super().__init__()
        self._settings, self._every = settings, False
        names = [name for name in OF_LOAD if name in (decided or {})]
        self._foreign = f"{places.PROJECT_FILE} sets {', '.join(names)}. " if names else ""
        self._order = next(iter(ORDERS))
        self._rows: list[PickerRow] = []
        self._words = "Checking what fits on this machine"
        self._note = self._basis = ""
        self._noted_at = ("", "")  # `_place` of the note
        self._job: Job[_Plans] | None = None
        self._removal: Job[int] | None = None

    def compose(self) -> ComposeResult:
        yield Static("", id="heading", markup=False)
        yield FilterInput(id="filter", compact=True)
        with Container(id="body"):
            yield ModelTable(id="models")
            with VerticalScroll(id="about", can_focus=False):
                yield Static("", id="sentence", markup=False)
        yield KeyLine(*FILTER_KEYS)

    def on_mount(self) -> None:
        """Show names at once; plans follow."""
        try:
            self._rows = picker_rows.name_rows()
        except LocalqError as error:
            self._tell(str(error))
        self._draw()
        self.watch(self, "focused", self._show_keys)
        self.call_after_refresh(self._drawn)

    def _show_keys(self) -> None:
        names = FILTER_KEYS if isinstance(self.focused, FilterInput) else LIST_KEYS
        self.query_one(KeyLine).show(*names)

    def _drawn(self) -> None:
        self._plan()
        self.post_message(self.Drawn())

    def on_unmount(self) -> None:
        """Abandon the jobs, so that the app can exit."""
        for job in (self._job, self._removal):
            if job is not None:
                job.abandon()

    # ---- plans

    def _plan(self) -> None:
        def work(watcher: PostingWatcher) -> _Plans:
            from localq.tui.models import picker_plans  # start-up cost

            outlook = picker_plans.outlook(self._settings, watcher.say)
            return _Plans(outlook, picker_plans.plan_rows(outlook, self._settings))

        if self._job is not None:
            self._job.abandon()
        self._job = Job("plans", work, self.post_message)
        self._job.start()

    @on(WatcherNotice)
    def _show_notice(self, message: WatcherNotice) -> None:
        message.stop()
        self._words = message.text
        self._draw()

    @on(Job.Ended)
    def _ended(self, message: Job.Ended) -> None:
        message.stop()
        if message.job is self._job and self._job is not None:
            self._planned(self._job.take())
        elif message.job is self._removal and self._removal is not None:
            freed = self._removal.take()
            self._tell(str(freed) if isinstance(freed, LocalqError) else f"{human_bytes(freed)} freed")
            self._plan()

    def _planned(self, plans: _Plans | LocalqError) -> None:
        if isinstance(plans, LocalqError):
            self._words = ""
            self._tell(str(plans))
        else:
            self._words, self._rows, self._basis = plans.outlook.words, plans.rows, plans.outlook.basis
        self._draw()

    # ---- drawing

    @property
    def _text(self) -> str:
        return self.query_one("#filter", Input).value

    @property
    def row(self) -> PickerRow | None:
        """The row under the cursor."""
        return self.query_one(ModelTable).row

    def _draw(self) -> None:
        order = f"{self._order[:1].upper()}{self._order[1:]}{', every format' if self._every else ''}"
        self.query_one("#heading", Static).update(sanitize(f"{self._foreign}{self._words}. {order}."))
        rows = picker_rows.filter_rows(self._rows, self._text, self._order, self._every)
        is_best_first = ORDERS[self._order] is None
        self.query_one(ModelTable).show(picker_rows.grouped(rows) if is_best_first else rows)
        self._describe()

    def _describe(self) -> None:
        row, text, shown = self.row, self._text.strip(), self.query_one("#sentence", Static)
        if self._note or row is None:
            shown.update(sanitize(self._note or f"No match. Press Enter to open {text!r} from the hub or disk."))
        elif self.has_class("-beside"):
            shown.update(model_card.card(row, self._basis, self._rows, ABOUT_CELLS))
        else:
            shown.update(sanitize(f"{row.sentence}{f'; tok/s {self._basis}' if row.tok_s is not None else ''}"))

    def on_resize(self) -> None:
        """Details beside the list, or a sentence below it."""
        self.call_after_refresh(self._describe)

    def _tell(self, note: str) -> None:
        self._note, self._noted_at = note, self._place()
        self._describe()

    def _place(self) -> tuple[str, str]:
        """The text of the filter, and the row under the cursor."""
        return self._text, self.row.name if self.row is not None else ""

    def _forget_note(self) -> None:
        """Drop the note of another row or filter. Events of what happened before the note can arrive after it."""
        if self._place() != self._noted_at:
            self._note = ""

    @on(Input.Changed, "#filter")
    def _filtered(self) -> None:
        self._forget_note()
        self._draw()

    @on(ModelTable.Moved)
    def _moved(self) -> None:
        self._forget_note()
        self._describe()

    # ---- what the user does

    def action_leave(self) -> None:
        """Clear the filter, or close the picker."""
        if self._text:
            self.query_one("#filter", Input).value = ""
            self.query_one("#filter", Input).focus()
        else:
            self.dismiss(None)

    @on(Input.Submitted, "#filter")
    def _entered(self) -> None:
        text, rows = self._text.strip(), self.query_one(ModelTable).rows_shown
        if not picker_rows.is_model_name(text, rows):
            self._pick()
            return
        try:
            target = catalog.resolve(text)
        except LocalqError as error:
            self._tell(str(error))
            return
        self.dismiss(PickedModel(text if target.path is None or target.store else str(target.path), None))

    @on(ModelTable.Opened)
    def _pick(self) -> None:
        if self.row is not None:
            self.dismiss(PickedModel(self.row.name, self.row.exact))

    def action_force(self) -> None:
        """Open a model that is too large by the plan, after confirmation."""
        row = self.row
        if row is None:
            return
        if row.verdict != picker_rows.TOO_LARGE:
            self._tell(f"This applies only to models that are too large ({row.name}: {row.verdict}).")
            return

        from localq.tui.models.picker_dialogs import (
            ForceScreen,  # start-up cost, as those below: `preload` imports them
        )

        def answered(yes: bool | None) -> None:
            if yes:
                self.dismiss(PickedModel(row.name, row.exact, force=True))

        self.app.push_screen(ForceScreen(row), answered)

    @on(ModelTable.SortedBy)
    def _sorted_by(self, message: ModelTable.SortedBy) -> None:
        self._order = message.order
        self._draw()

    def action_sort(self) -> None:
        """Use the next sort order."""
        orders = list(ORDERS)
        self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        self._draw()

    def action_every(self) -> None:
        """Unfold the families: all models in every format; or fold them."""
        self._every = not self._every
        self._draw()

    def action_filter(self) -> None:
        """Focus the filter."""
        self.query_one("#filter", Input).focus()

    def action_list(self) -> None:
        """Focus the list."""
        self.query_one(ModelTable).focus()

    def action_details(self) -> None:
        """Show details, as `localq show`."""
        from localq.tui.models.picker_dialogs import DetailsScreen

        if self.row is not None:
            self.app.push_screen(DetailsScreen(self.row.full_name, self._settings))

    def action_pull(self) -> None:
        """Fetch the model without opening it."""
        from localq.tui.models.opening_screen import PullScreen  # it knows the hub

        row = self.row
        if row is None:
            return
        if row.local is not None and row.local.complete:
            self._tell(f"{row.name} is already on disk: {row.local.path}")
            return
        self.app.push_screen(PullScreen(row.full_name, self._settings), self._pulled)

    def _pulled(self, outcome: Path | LocalqError | None) -> None:
        if isinstance(outcome, StoppedError):
            self._tell(f"Stopped. To resume: {active_key(self, 'picker_pull')}")
        elif isinstance(outcome, LocalqError):
            self._tell(str(outcome))
        elif outcome is not None:
            self._tell(f"Downloaded and verified: {outcome}")
        self._plan()

    def action_delete(self) -> None:
        """Delete the model from disk, after confirmation."""
        from localq.tui.models.picker_dialogs import RemoveScreen

        row = self.row
        model = row.local if row is not None else None
        if model is None:
            self._tell(row.sentence if row is not None and row.verdict == picker_rows.UNREADABLE else "Not on disk.")
            return
        try:
            removal.refuse_foreign([model])
        except LocalqError as error:
            self._tell(str(error))
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._remove(model)

        self.app.push_screen(RemoveScreen(model), answered)

    def _remove(self, model: LocalModel) -> None:
        self._tell(f"Deleting {model.name}")
        self._removal = Job(model.name, lambda watcher: removal.remove([model]), self.post_message)
        self._removal.start()
