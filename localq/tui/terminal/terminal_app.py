"""Base of the app and of its screens: input, output, resizing, terminals of zero size.

A terminal that is too small for a moment leaves lists without height, a captured mouse and no focus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from textual.actions import ActionParseResult
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

from localq.tui.terminal.error_guard import GuardedApp
from localq.tui.terminal.input_priority import InputPriority, TakesInputFirst, is_typed
from localq.tui.terminal.sanitized_lines import SANITIZE_LINES

if TYPE_CHECKING:
    _Screen = Screen[Any]
else:
    _Screen = object  # a base with styles would hide those of the screen


class TerminalScreen(_Screen):
    """Mixin of screens, listed before Textual's class.

    A screen is laid out for the terminal's current size, whatever the event says: of two queued events with different
    sizes Textual answers each with another, without end (8.2, `Screen._refresh_layout`). It restores the focus, and is
    dismissed only once.
    """

    _ending: tuple[Any] | None = None  # pending result

    def _screen_resized(self, size: Size) -> None:
        super()._screen_resized(self.app.size)
        self.call_after_refresh(self._update_auto_focus)  # a widget without room has lost the focus

    def dismiss(self, result: Any = None) -> AwaitComplete:
        """Dismiss this screen only; Textual's dismisses the top one, so a second press would take the screen below.

        Below another screen, or before it is mounted, the dismissal waits.
        """
        if self.app.screen is self and self.is_mounted:
            return super().dismiss(result)
        self._ending = (result,)
        return AwaitComplete.nothing()  # type: ignore[no-untyped-call, no-any-return]

    def on_mount(self) -> None:
        """Run a pending dismissal after mounting."""
        self.call_later(self._end)

    def on_screen_resume(self) -> None:
        """Run a pending dismissal when the screen is on top again."""
        self._end()

    def _end(self) -> None:
        """Run a pending dismissal, if it is possible now."""
        if self._ending is not None and self.app.screen is self and self.is_mounted:
            super().dismiss(*self._ending)


class _Lowest(TerminalScreen, Screen[None]):
    pass


class TerminalApp(GuardedApp):
    """An app that returns an exit code."""

    def __init__(self, ansi_color: bool = False) -> None:
        super().__init__(ansi_color=ansi_color)
        self.input_priority = InputPriority()

    def get_driver_class(self) -> type[Driver]:
        """Textual's driver, with our input and output."""
        from textual.drivers.linux_driver import LinuxDriver  # only on Linux

        from localq.tui.terminal.terminal_input import TerminalDriver

        found = super().get_driver_class()
        return TerminalDriver if found is LinuxDriver else found

    def reset_terminal(self) -> None:
        """Reset the terminal without leaving the app, for a process that is ended by force."""
        from localq.tui.terminal.terminal_input import TerminalDriver

        if isinstance(self._driver, TerminalDriver):
            self._driver.reset_terminal()

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's filters, and the one that removes control characters."""
        return [*super().get_line_filters(), SANITIZE_LINES]

    def get_default_screen(self) -> Screen[Any]:
        """The bottom screen."""
        return _Lowest(id="_default")

    def on_resize(self, event: Resize) -> None:
        """Redraw: a terminal that was small for a moment lost its content, and Textual draws only for a new size."""
        if self.screen.size == event.size:
            self.refresh()

    async def on_event(self, event: Event) -> None:
        """As Textual's, but release a mouse captured by a removed widget, and give keys a focus if there is none."""
        if isinstance(event, MouseEvent):
            self._free_mouse()
        elif isinstance(event, Paste) or is_typed(event):
            self.app_focus = True
            if self.focused is None:
                self.screen._update_auto_focus()
        await super().on_event(event)
        if is_typed(event) and not isinstance(self.focused, TakesInputFirst):  # it reports its keys itself
            self.input_priority.key_handled()

    def _handle_exception(self, error: Exception) -> None:
        """As the base's, but ignore errors of widgets that are mounted while the app exits."""
        cause = error.error if isinstance(error, WorkerFailed) else error  # the palette searches in a worker
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
        """As Textual's, but ignore a KeyError of a list without height."""
        try:
            return await super().run_action(action, default_namespace, namespaces)
        except KeyError:
            if not isinstance(default_namespace, CommandPalette | OptionList):
                raise
            return False


class InputPriorityScreen(_Screen):
    """A screen that draws typed text at once, and the rest when no key waits.

    Layout and painting are in separate turns of the event loop, so that a key waits for one of them.
    """

    app: TerminalApp

    _is_frame = _laying_out = _unpainted = False
    _notified: Set[Widget] = frozenset()  # widgets of the last layout that were notified

    def _on_timer_update(self) -> None:
        if self.app.input_priority.is_waiting:
            return  # the timer continues
        if self._unpainted:
            if not self.app._batch_count:  # else nothing would be painted
                self._paint()
            return
        self._is_frame = True
        try:
            super()._on_timer_update()
        finally:
            self._is_frame = False

    def _paint(self) -> None:
        """Paint the layout, with later changes."""
        self._update_timer.pause()
        self._compositor.update_widgets(self._dirty_widgets)
        self._compositor_refresh()
        if self.app.screen is self:
            self.check_idle()  # more may be pending; below another screen that one handles it

    async def _on_idle(self, event: Idle) -> None:
        """As Textual's, but callbacks after a refresh wait for painting too."""
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
            self._notify_shown(known)

    def _notify_shown(self, known: set[Widget]) -> None:
        """Notify widgets that became visible.

        Textual (8.2) notifies those missing from the map before the layout, all but `known`; a query for a place behind
        a scroll rebuilds that map, and widgets in it would miss the notification.
        """
        found = self._compositor._full_map
        for widget in (found.keys() & known) - self._notified:
            place = found[widget]
            widget.post_message(Resize(place.region.size, place.virtual_size, place.container_size))
            widget.post_message(Show())
        self._notified = set(found)

    def _compositor_refresh(self) -> None:
        self._unpainted = self._laying_out
        if self._laying_out:
            self._update_timer.resume()
        else:
            self.app.input_priority.forget()
            super()._compositor_refresh()

    def draw_first(self, widget: Widget) -> None:
        """A key was handled in `widget`: draw it, unless more keys wait."""
        self.app.input_priority.key_handled()
        if not self.app.input_priority.is_waiting:
            self.draw_alone(widget)

    def draw_alone(self, widget: Widget) -> None:
        """Draw `widget` now, unless its size changed. Other changes wait for the next frame, also in a batch update."""
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
