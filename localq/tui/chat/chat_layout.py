"""`ChatLayout`: the parts of the chat screen and their places at each terminal size."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from localq import places
from localq.chat.terminal.input_history import InputHistory
from localq.keymap import bindings
from localq.sanitize import sanitize
from localq.tui.chat.composer import Composer
from localq.tui.chat.composer_area import ComposerArea
from localq.tui.chat.conversation_view import ConversationView
from localq.tui.chat.part_cache import PartCache
from localq.tui.chat.sidebar import Sidebar
from localq.tui.chat.status_line import StatusLine
from localq.tui.instruments.instrument_panel import InstrumentPanel, Mode
from localq.tui.jobs.chat_app import ChatApp
from localq.tui.jobs.command_host import TuiHost
from localq.tui.keys import first_key
from localq.tui.terminal.terminal_app import InputPriorityScreen, TerminalScreen

if TYPE_CHECKING:
    from localq.chat.history.record import Record

WIDE = 120  # columns from which the instruments are at the side
LOW = 16  # rows below which the prompt has no border


class ChatLayout(InputPriorityScreen, TerminalScreen, PartCache, Screen[None]):
    """Conversation, prompt, instruments, status line and sidebar."""

    AUTO_FOCUS = "Composer"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-middle"), (WIDE, "-wide"), (160, "-broad"), (200, "-vast")]  # noqa: RUF012 - as its base has it
    VERTICAL_BREAKPOINTS = [(0, "-low"), (LOW, "-high")]  # noqa: RUF012

    app: ChatApp

    def __init__(self, past: InputHistory, record: Record | None, empty: bool) -> None:
        """record: shown until a model is open. empty: no parts until `fill`, as another screen is shown first."""
        super().__init__()
        self._empty, self._filling = empty, asyncio.Lock()
        self._past, self._record = past, record

    def compose(self) -> ComposeResult:
        """The parts, unless `empty`."""
        self._classify()
        if not self._empty:
            yield from self._parts()

    async def fill(self) -> None:
        """Create the parts that were deferred; may be called again."""
        async with self._filling:
            if self._empty:
                await self.mount(*self._parts())
                self._empty = False

    def _parts(self) -> list[Widget]:
        conversation = ConversationView(TuiHost(self.app), self._record, id="conversation")
        main = Vertical(conversation, ComposerArea(self._past, id="writing"), id="main")
        instruments = InstrumentPanel(id="instruments", mode=_mode(self.app.size.width))
        status = StatusLine(id="status", hint=self._hint(), on_tick=conversation.show_phase)
        project = Static(_project_line(self.app.decided), id="project", markup=False)
        project.display = bool(self.app.decided)
        return [Horizontal(Sidebar(id="sidebar"), main, instruments, id="body"), project, status]

    def show_project(self) -> None:
        """Name what a project's file decides, as long as it counts."""
        for each in self.query("#project").results(Static):  # none until `fill`
            decided = self.app.decided
            if decided or each.display:  # no layout for nothing
                each.update(_project_line(decided))
                each.display = bool(decided)

    def _hint(self) -> str:
        """The key of the help, where the prompt has no border that shows it."""
        is_low = self.app.size.height < LOW
        return f"{first_key(bindings(self.app.settings.keys)['help'])} help" if is_low else ""

    def _classify(self) -> None:
        """Set the classes for the size before the first frame; a class set later restyles the whole screen."""
        width, height = self.app.size
        sized = ((width, self.HORIZONTAL_BREAKPOINTS), (height, self.VERTICAL_BREAKPOINTS))
        self.add_class(*(max(each for each in points if each[0] <= size)[1] for size, points in sized), update=False)
        self.set_class(width >= WIDE, "instruments", update=False)

    def on_resize(self, event: events.Resize) -> None:
        """Instruments at the side, or as a strip below; the key of the help where it is seen."""
        for status in self.query(StatusLine):
            status.status = replace(status.status, hint=self._hint())
        for each in self.query(InstrumentPanel):
            each.mode = _mode(event.size.width)

    @property
    def conversation(self) -> ConversationView:
        """The conversation view."""
        return self.part(ConversationView)

    @property
    def busy(self) -> bool:
        """True while a job runs."""
        return any(each.busy for each in self.query(ConversationView))

    @property
    def composer(self) -> Composer:
        """The prompt."""
        return self.part(Composer)

    @property
    def instruments(self) -> InstrumentPanel:
        """The instrument panel."""
        return self.part(InstrumentPanel)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Ignore keys before the parts exist."""
        return not self._empty and super().check_action(action, parameters)


def _project_line(decided: Mapping[str, str]) -> str:
    """Return a line on the settings of project files, names first: a narrow screen has no room for the path."""
    names, paths = ", ".join(decided), ", ".join(dict.fromkeys(decided.values()))
    return " ".join(sanitize(f"! {places.PROJECT_FILE} sets {names}: {paths}").split())


def _mode(width: int) -> Mode:
    """Mode of the instruments at a screen width."""
    return "side" if width >= WIDE else "strip"
