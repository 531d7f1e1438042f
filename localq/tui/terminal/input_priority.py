"""Keys before all else that is drawn: what has been read of the keyboard and was not answered on the screen yet.

A conversation takes longer to lay out and draw than a letter; while one waits, the conversation does, for `PATIENCE_S`
at most, so that a key that is never answered (it has gone to a dialog) holds nothing up for good.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

from textual.events import Idle, Key, Resize, Show
from textual.geometry import Size
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget

if TYPE_CHECKING:
    from localq.tui.terminal.terminal_app import TerminalApp

    _Screen = Screen[Any]
else:
    _Screen = object  # as in `terminal_app`
PATIENCE_S = 0.05
EDITING = frozenset(("enter", "backspace", "tab", "up", "down", "left", "right"))  # no keys of the app's


def is_typed(message: Message) -> bool:
    """Whether it is a key that changes what is being written."""
    return isinstance(message, Key) and (message.is_printable or message.key in EDITING)


class KeysFirst:
    """Keys that wait. `came` may be called in any thread; what is lost where two meet is one key's precedence."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count, self._since_s = 0, 0.0

    def came(self) -> None:
        """One was read."""
        if not self._count:
            self._since_s = self._clock()
        self._count += 1

    def answered(self) -> None:
        """One was done."""
        self._count = max(0, self._count - 1)

    def forget(self) -> None:
        """All of the screen is drawn now, and with it whatever came of them."""
        self._count = 0

    @property
    def wait(self) -> bool:
        """There are some, and they have not waited too long."""
        return self._count > 0 and self._clock() - self._since_s < PATIENCE_S


class KeysFirstScreen(_Screen):
    """A screen that draws what is written at once, by itself, and all else when no key waits: at one turn it is laid
    out, at the next it is painted, so that a key waits for one of them."""

    app: TerminalApp

    _is_frame = _laying_out = _unpainted = False
    _told: Set[Widget] = frozenset()  # of the last layout: they know that they are shown

    def _on_timer_update(self) -> None:
        if self.app.keys_first.wait:
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
            self.app.keys_first.forget()
            super()._compositor_refresh()

    def draw_first(self, widget: Widget) -> None:
        """A key is done in `widget`: draw that, unless more of them come."""
        self.app.keys_first.answered()
        if not self.app.keys_first.wait:
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
