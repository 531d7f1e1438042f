"""The list of conversations: search, rename, delete with undo, resume, start a new one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.actions import SkipAction
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.message import Message
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import Button, Input, OptionList, Static
from textual.widgets.option_list import Option

from localq.chat.history.record import RecordSummary
from localq.chat.history.store import ConversationStore
from localq.errors import LocalqError
from localq.sanitize import sanitize
from localq.tui.chat.session_lines import day, heading, one_line, prompt, unsaved_prompt
from localq.tui.jobs.job import Job
from localq.tui.jobs.thread_messages import PostingWatcher
from localq.tui.key_line import KeyLine
from localq.tui.keys import active_key, bindings

LIMIT = 200  # conversations in the list; the search covers all
PAUSE_S = 0.15  # pause in typing before a search


@dataclass(frozen=True)
class _Listed:
    summaries: list[RecordSummary]
    note: str


class _SearchInput(Input):
    BINDINGS: ClassVar = [*bindings("sidebar_list")]

    def action_list(self) -> None:
        self.screen.query_one("#list").focus()


class _List(OptionList):
    def action_cursor_up(self) -> None:  # above the first is the search
        above = range(self.highlighted or 0)
        if any(not self.get_option_at_index(place).disabled for place in above):
            super().action_cursor_up()
        else:
            self.screen.query_one("#search").focus()


class SessionsPanel(Widget):
    """Conversations of `store`, the last used first. Queries run in a thread."""

    DEFAULT_CSS = Path(__file__).with_suffix(".tcss").read_text(encoding="utf-8")
    BINDINGS: ClassVar = [
        *bindings("sidebar_new", "sidebar_rename", "sidebar_delete", "sidebar_undo", "sidebar_search", "sidebar_back"),
    ]

    class Chosen(Message):
        """Resume the conversation `id`."""

        def __init__(self, id: int) -> None:
            super().__init__()
            self.id = id

    class New(Message):
        """Start a new conversation."""

    def __init__(self, store: ConversationStore, current_id: int | None = None, unsaved: str = "") -> None:
        """unsaved: why the open conversation is not saved, if it is not; as for `refresh_list`."""
        super().__init__()
        self._store, self._current, self._unsaved = store, current_id, unsaved
        self._summaries: list[RecordSummary] = []
        self._deleted: list[RecordSummary] = []
        self._renaming: RecordSummary | None = None
        self._note = ""
        self._job: Job[_Listed] | None = None
        self._pause: Timer | None = None

    def compose(self) -> ComposeResult:
        yield _SearchInput(placeholder="Search conversations", compact=True, id="search")
        yield Input(placeholder="New title", compact=True, id="title")
        yield _List(markup=False, compact=True, id="list")
        yield Static("", id="about", markup=False)
        with Horizontal(id="buttons"):
            for name in ("new", "rename", "delete", "undo"):
                yield Button(name.capitalize(), id=name, compact=True)
        yield KeyLine("sidebar_back", "sidebar_list", "sidebar_search", sidebar_list="list")

    def on_mount(self) -> None:
        """Load the list."""
        self.query_one("#title").display = False
        self._describe()
        self._work(lambda: "")

    def on_unmount(self) -> None:
        """Abandon the query, so that the app can exit."""
        if self._job is not None:
            self._job.abandon()

    def refresh_list(self, current_id: int | None, unsaved: str = "") -> None:
        """Reload; `current_id` is the current conversation; `unsaved`: why the open one is not saved, else empty."""
        self._current, self._unsaved = current_id, unsaved
        self._work(lambda: "")

    # ---- the store, in a thread

    def _work(self, change: Callable[[], str]) -> None:
        """Run `change` (its return value is shown as a note), then reload the list."""
        matching = self.query_one("#search", Input).value.strip()

        def work(watcher: PostingWatcher) -> _Listed:
            try:
                note = change()
            except LocalqError as error:  # reload anyway: the list may be outdated
                note = str(error)
            return _Listed(self._store.summaries(matching, LIMIT), note)

        if self._job is not None:
            self._job.abandon()  # its list is outdated; its change still happens
        self._job = Job("conversations", work, self.post_message)
        self._job.start()

    @on(Job.Ended)
    def _ended(self, message: Job.Ended) -> None:
        message.stop()
        if message.job is not self._job or self._job is None:
            return
        outcome, self._job = self._job.take(), None
        if isinstance(outcome, LocalqError):
            self._tell(str(outcome))
            return
        self._summaries, self._note = outcome.summaries, outcome.note or self._note
        self._draw()

    # ---- what is shown

    @property
    def summary(self) -> RecordSummary | None:
        """The highlighted conversation."""
        id = self.summary_id
        return next((each for each in self._summaries if each.id == id), None)

    def _draw(self) -> None:
        shown, before = self.query_one("#list", OptionList), self.summary_id
        now_s = time.time()
        shown.clear_options()
        shown.add_options(self._options(now_s))
        ids = [each.id for each in self._summaries]
        wanted = next((id for id in (before, self._current, *ids) if id in ids), None)
        shown.highlighted = None if wanted is None else shown.get_option_index(str(wanted))
        self._describe()

    def _options(self, now_s: float) -> list[Option]:
        """The conversations, with a heading before those of another day."""
        found, last = list[Option](), ""
        if self._unsaved and not self._searched:
            found.append(Option(unsaved_prompt(self._unsaved), disabled=True))
        for each in self._summaries:
            name = day(each.changed_s, now_s)
            if name != last:
                found.append(Option(heading(name), disabled=True))
                last = name
            found.append(Option(prompt(each, self._current, now_s), id=str(each.id)))
        return found

    @property
    def summary_id(self) -> int | None:
        """Number of the conversation highlighted in the drawn list, also after `_summaries` has changed."""
        shown = self.query_one("#list", OptionList)
        option = shown.highlighted_option
        return int(option.id) if option is not None and option.id is not None else None

    def _describe(self) -> None:
        found, summary = len(self._summaries), self.summary
        if self._renaming is not None:
            text = f"Enter: rename; {active_key(self.screen, 'sidebar_back')}: cancel"
        elif self._note:
            text = self._note
        elif summary is None:
            text = "" if self._job is not None else "No match" if self._searched else self._nothing
        else:
            more = f" (newest {LIMIT} shown; search for older ones)" if found >= LIMIT else ""
            text = f"{one_line(summary.title)}, {one_line(summary.model)}{more}"
        self.query_one("#about", Static).update(sanitize(text))
        self._enable("rename", summary is not None)
        self._enable("delete", summary is not None)
        self._enable("undo", bool(self._deleted))

    @property
    def _nothing(self) -> str:
        return "No saved conversations" if self._unsaved else "No conversations yet"

    def _enable(self, name: str, is_enabled: bool) -> None:
        button = self.query_one(f"#{name}", Button)
        if button.has_focus and not is_enabled:
            self.query_one("#list").focus()  # else the keys of the list would go nowhere
        button.disabled = not is_enabled

    @property
    def _searched(self) -> str:
        return self.query_one("#search", Input).value.strip()

    def _tell(self, note: str) -> None:
        self._note = note
        self._describe()

    # ---- what the user does

    @on(Input.Changed, "#search")
    def _typed(self, message: Input.Changed) -> None:
        message.stop()
        if self._pause is not None:
            self._pause.stop()
        self._note = ""
        self._pause = self.set_timer(PAUSE_S, lambda: self._work(lambda: ""))

    @on(Input.Submitted, "#search")
    def _found(self, message: Input.Submitted) -> None:
        message.stop()
        self.query_one("#list").focus()

    @on(OptionList.OptionHighlighted)
    def _moved(self, message: OptionList.OptionHighlighted) -> None:
        message.stop()
        self._describe()

    @on(OptionList.OptionSelected)
    def _selected(self, message: OptionList.OptionSelected) -> None:
        message.stop()
        if message.option.id is not None:
            self._note = ""
            self.post_message(self.Chosen(int(message.option.id)))

    @on(Button.Pressed)
    async def _pressed(self, message: Button.Pressed) -> None:
        message.stop()
        await self.run_action(message.button.id or "")

    def action_back(self) -> None:
        """Cancel a rename, then clear a search; else let the screen handle the key."""
        if self._renaming is not None:
            self._end_renaming()
        elif self._searched:
            self.query_one("#search", Input).value = ""
            self.query_one("#list").focus()
        else:
            raise SkipAction

    def action_new(self) -> None:
        """Start a new conversation."""
        self.post_message(self.New())

    def action_search(self) -> None:
        """Focus the search."""
        self.query_one("#search").focus()

    def action_rename(self) -> None:
        """Edit the title."""
        summary = self.summary
        if summary is None:
            return
        self._renaming = summary
        title = self.query_one("#title", Input)
        title.value = one_line(summary.title)
        title.display, self.query_one("#search").display = True, False
        title.focus()
        self._describe()

    @on(Input.Submitted, "#title")
    def _renamed(self, message: Input.Submitted) -> None:
        message.stop()
        summary, title = self._renaming, one_line(message.value).strip()
        self._end_renaming()
        if summary is None or not title or title == summary.title:
            return

        def rename() -> str:
            self._store.rename(summary.id, title)
            return f"Renamed: {title}"

        self._work(rename)

    def _end_renaming(self) -> None:
        self._renaming = None
        self.query_one("#title").display, self.query_one("#search").display = False, True
        self.query_one("#list").focus()
        self._describe()

    def action_delete(self) -> None:
        """Delete a conversation, with undo."""
        summary = self.summary
        if summary is None:
            return

        undo = active_key(self.screen, "sidebar_undo")

        def delete() -> str:
            self._store.delete(summary.id)
            self._deleted.append(summary)
            return f"Deleted: {one_line(summary.title)}. Undo: {undo}"

        self._work(delete)

    def action_undo(self) -> None:
        """Restore the last deleted conversation."""
        if not self._deleted:
            self._tell("Nothing to undo.")
            return
        summary = self._deleted.pop()

        def restore() -> str:
            self._store.restore(summary.id)
            return f"Restored: {one_line(summary.title)}"

        self._work(restore)
