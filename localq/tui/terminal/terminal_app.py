"""What our app adds to Textual's at a terminal: how it is read, what reaches it, its sizes, and what a size of nothing
leaves behind: lists of no height, a mouse that is held, no focus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from textual.actions import ActionParseResult
from textual.app import App
from textual.await_complete import AwaitComplete
from textual.command import CommandPalette
from textual.css.query import NoMatches
from textual.dom import DOMNode
from textual.driver import Driver
from textual.errors import NoWidget
from textual.events import Event, Idle, MouseEvent, Paste, Resize, Show
from textual.filter import LineFilter
from textual.geometry import Size
from textual.screen import Screen
from textual.widget import MountError, Widget
from textual.widgets import OptionList
from textual.worker import WorkerFailed

from localq.tui.terminal.input_priority import InputPriority, TakesInputFirst, is_typed
from localq.tui.terminal.sanitized_lines import SANITIZE_LINES

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
        self.input_priority = InputPriority()

    def get_driver_class(self) -> type[Driver]:
        """Textual's, but for how a terminal is read."""
        from textual.drivers.linux_driver import LinuxDriver  # where there is one

        from localq.tui.terminal.terminal_input import TerminalDriver

        found = super().get_driver_class()
        return TerminalDriver if found is LinuxDriver else found

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's, and the one that lets no control character through."""
        return [*super().get_line_filters(), SANITIZE_LINES]

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
        if is_typed(event) and not isinstance(self.focused, TakesInputFirst):  # which says so itself
            self.input_priority.key_handled()

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


class InputPriorityScreen(_Screen):
    """A screen that draws what is written at once, by itself, and all else when no key waits: at one turn it is laid
    out, at the next it is painted, so that a key waits for one of them."""

    app: TerminalApp

    _is_frame = _laying_out = _unpainted = False
    _told: Set[Widget] = frozenset()  # of the last layout: they know that they are shown

    def _on_timer_update(self) -> None:
        if self.app.input_priority.is_waiting:
            return  # the timer goes on
        if self._unpainted:
            if not self.app._batch_count:  # else nothing would be shown of it
                self._paint()
            return
        self._is_frame = True
        try:
            super()._on_timer_update()
        finally:
            self._is_frame = False

    def _paint(self) -> None:
        """What was laid out, with what has changed since."""
        self._update_timer.pause()
        self._compositor.update_widgets(self._dirty_widgets)
        self._compositor_refresh()
        if self.app.screen is self:
            self.check_idle()  # more may have been asked for; below another screen that is for that one to say

    async def _on_idle(self, event: Idle) -> None:
        """Textual's; but what waits until all is drawn waits for the paint, too."""
        if self._unpainted:
            event.prevent_default()
            self._update_timer.resume()

    def _refresh_layout(self, size: Size | None = None, scroll: bool = False) -> None:
        self._laying_out = self._is_frame and self.app.screen is self
        known, old = set(self._compositor._full_map), self._compositor._full_map
        try:
            super()._refresh_layout(size, scroll)
        finally:
            self._laying_out = False
        if self._compositor._full_map is not old:
            self._tell_shown(known)

    def _tell_shown(self, known: set[Widget]) -> None:
        """Textual (8.2) tells those that they are shown that the map before this layout lacks (all but `known`). But
        whoever asks for a place behind a scroll has that map made anew, and what was to be shown by then is in it."""
        found = self._compositor._full_map
        for widget in (found.keys() & known) - self._told:
            place = found[widget]
            widget.post_message(Resize(place.region.size, place.virtual_size, place.container_size))
            widget.post_message(Show())
        self._told = set(found)

    def _compositor_refresh(self) -> None:
        self._unpainted = self._laying_out
        if self._laying_out:
            self._update_timer.resume()
        else:
            self.app.input_priority.forget()
            super()._compositor_refresh()

    def draw_first(self, widget: Widget) -> None:
        """A key is done in `widget`: draw that, unless more of them come."""
        self.app.input_priority.key_handled()
        if not self.app.input_priority.is_waiting:
            self.draw_alone(widget)

    def draw_alone(self, widget: Widget) -> None:
        """Draw `widget` now, unless it has another size now. What else has changed waits for the next frame; nothing
        is laid out, not even what is changed as one (`batch_update`)."""
        app, compositor = self.app, self._compositor
        if not self.is_current or widget._layout_required:
            return
        others, self._dirty_widgets = self._dirty_widgets, set()
        regions, compositor._dirty_regions = compositor._dirty_regions, set()
        batch, app._batch_count = app._batch_count, 0
        compositor.update_widgets({widget})
        super()._compositor_refresh()
        self._dirty_widgets, app._batch_count = others, batch
        compositor._dirty_regions |= regions
