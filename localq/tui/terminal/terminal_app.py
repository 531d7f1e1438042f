"""What our app adds to Textual's at a terminal: how it is read, what reaches it, its sizes, and what a size of nothing
leaves behind: lists of no height, a mouse that is held, no focus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from textual.actions import ActionParseResult
from textual.app import App
from textual.await_complete import AwaitComplete
from textual.command import CommandPalette
from textual.css.query import NoMatches
from textual.dom import DOMNode
from textual.driver import Driver
from textual.errors import NoWidget
from textual.events import Event, MouseEvent, Paste, Resize
from textual.filter import LineFilter
from textual.geometry import Size
from textual.screen import Screen
from textual.widget import MountError
from textual.widgets import OptionList
from textual.worker import WorkerFailed

from localq.tui.chat.composer import Composer
from localq.tui.terminal.input_priority import KeysFirst, is_typed
from localq.tui.terminal.sanitized_lines import CLEAN_LINES

if TYPE_CHECKING:
    _Screen = Screen[Any]
else:
    _Screen = object  # a class with styles of its own would hide those of the screen that it is part of


class TerminalScreen(_Screen):
    """What ours add to Textual's, and stands before it among their bases: a screen is laid out for the size that the
    terminal has now, whatever an event says, gives the focus again to what had no room, and ends once.

    Of two events of different sizes that wait, Textual answers each by one more like it, without end (8.2,
    `Screen._refresh_layout`).
    """

    _ending: tuple[Any] | None = None  # what it ends with

    def _screen_resized(self, size: Size) -> None:
        super()._screen_resized(self.app.size)
        self.call_after_refresh(self._update_auto_focus)  # what had no room for a moment has lost the focus

    def dismiss(self, result: Any = None) -> AwaitComplete:
        """Textual's takes away whatever lies on top: of two presses at once the second took the screen below. One that
        ends below another, or before it is there, waits until it may."""
        if self.app.screen is self and self.is_mounted:
            return super().dismiss(result)
        self._ending = (result,)
        return AwaitComplete.nothing()  # type: ignore[no-untyped-call, no-any-return]

    def on_mount(self) -> None:
        """All of it is there once this is answered."""
        self.call_later(self._end)

    def on_screen_resume(self) -> None:
        """Nothing lies above any more."""
        self._end()

    def _end(self) -> None:
        """As was asked for when it could not."""
        if self._ending is not None and self.app.screen is self and self.is_mounted:
            super().dismiss(*self._ending)


class _Lowest(TerminalScreen, Screen[None]):
    pass


class TerminalApp(App[int]):
    """An app that returns an exit code."""

    def __init__(self, ansi_color: bool = False) -> None:
        super().__init__(ansi_color=ansi_color)
        self.keys_first = KeysFirst()

    def get_driver_class(self) -> type[Driver]:
        """Textual's, but for how a terminal is read."""
        from textual.drivers.linux_driver import LinuxDriver  # where there is one

        from localq.tui.terminal.terminal_input import TerminalDriver

        found = super().get_driver_class()
        return TerminalDriver if found is LinuxDriver else found

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's, and the one that lets no control character through."""
        return [*super().get_line_filters(), CLEAN_LINES]

    def get_default_screen(self) -> Screen[Any]:
        """The one below all others."""
        return _Lowest(id="_default")

    def on_resize(self, event: Resize) -> None:
        """A terminal that was small for a moment has cut off what it showed; Textual draws where the size is new."""
        if self.screen.size == event.size:
            self.refresh()

    async def on_event(self, event: Event) -> None:
        """Textual's; but what is not shown any more lets go of the mouse, and keys are not lost that come while nothing
        has the focus because what had it was hidden for a moment."""
        if isinstance(event, MouseEvent):
            self._free_mouse()
        elif isinstance(event, Paste) or is_typed(event):
            self.app_focus = True
            if self.focused is None:
                self.screen._update_auto_focus()
        await super().on_event(event)
        if is_typed(event) and not isinstance(self.focused, Composer):  # which says so itself
            self.keys_first.answered()

    def _handle_exception(self, error: Exception) -> None:
        """Textual's; but where the app ends, what is just being made finds nothing of itself, and nobody is to know."""
        cause = error.error if isinstance(error, WorkerFailed) else error  # the palette looks for its lines in a worker
        if not (self._exit and isinstance(cause, NoMatches | MountError)):
            super()._handle_exception(error)

    def _free_mouse(self) -> None:
        if self.mouse_captured is not None:
            try:
                self.screen.find_widget(self.mouse_captured)
            except NoWidget:
                self.capture_mouse(None)

    async def run_action(
        self, action: str | ActionParseResult, default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:  # fmt: skip
        """Textual's; but a list that has no height knows no place of its lines, which is no reason to end."""
        try:
            return await super().run_action(action, default_namespace, namespaces)
        except KeyError:
            if not isinstance(default_namespace, CommandPalette | OptionList):
                raise
            return False
