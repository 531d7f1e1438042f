"""The transcript: the newest turns, older ones on demand, and notices between them.

`sync` shows the path of a conversation and keeps the turns that are drawn already. The view follows the end unless the
user has scrolled up.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widget import Widget

from localq.chat.history.conversation import Conversation
from localq.stats import Stats
from localq.tui.chat.status_line import short_name
from localq.tui.chat.transcript_lines import EarlierTurns, Notice
from localq.tui.chat.turn_view import DrawnTurn, TurnView
from localq.tui.chat.welcome import Welcome
from localq.tui.keys import bindings
from localq.tui.reply.repeated_row import RepeatedRow

WINDOW = 50  # turns drawn at first, and added each time the user goes further back
MOST_DRAWN = 3 * WINDOW  # while the end is followed: every layout takes time for each turn


class TranscriptView(RepeatedRow, VerticalScroll, can_focus=False):
    """Turns and notices."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings("turn_before", "turn_after", "line_up", "line_down", "first", "last"),
        *bindings("edit", "regenerate", "copy_turn", "branch_before", "branch_after", "write"),
    ]

    class WriteRequested(Message):
        """Focus the prompt."""

    class TurnRequested(Message):
        """An action on turn `number`: "edit", "regenerate", or another "version" by `step`."""

        def __init__(self, number: int, what: str, step: int = 0) -> None:
            super().__init__()
            self.number, self.what, self.step = number, what, step

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._earlier, self.welcome = EarlierTurns(), Welcome()
        self._fixed = (self._earlier, self.welcome)
        self._views: list[TurnView] = []
        self._first = 0  # place in the path of the first drawn turn
        self._conversation = Conversation()
        self._versions: dict[int, str] = {}
        self._syncing, self._one = False, asyncio.Lock()  # several callers may sync at once
        self.folded = True

    def compose(self) -> list[Widget]:
        """No turns at first."""
        self._earlier.display = False
        return [*self._fixed]

    def on_mount(self) -> None:
        """Follow the end."""
        self.anchor()

    # ---- showing

    async def sync(self, conversation: Conversation, live: bool = False) -> None:
        """Show the path of `conversation`; drawn turns that are not on it are removed.

        live: a reply is streaming, so a last reply that is not drawn yet is that one.
        """
        async with self._one:
            self._syncing = True
            try:
                await self._sync(conversation, live)
            finally:
                self._syncing = False

    async def _sync(self, conversation: Conversation, live: bool) -> None:
        path = conversation.path()
        shown = [view.turn.number for view in self._views]
        if live and path and path[-1] not in shown and conversation.turns[path[-1]].message.role == "assistant":
            path = path[:-1]
        same = self._same(path, shown) if conversation is self._conversation else 0
        self._conversation = conversation
        if same == 0:
            self._first = max(0, len(path) - WINDOW)
            if shown:  # with their notices
                gone = [each for each in self.children if each not in self._fixed and not is_live(each)]
                await self.remove_children(gone)
            self._views = []
        elif same < len(shown):
            behind = self.children[self.children.index(self._views[same]) :]
            self._views = self._views[:same]
            await self.remove_children([each for each in behind if not is_live(each)])
        self._versions = conversation.versions(path[self._first :])
        added = [TurnView(self._turn(number)) for number in path[self._first + same :]]
        self._views += added
        if added:
            await self.mount_all(added)
            for view in added:
                view.fold(self.folded)
        for view in self._views:
            if view.turn.number is not None:
                view.show(self._turn(view.turn.number))
        self._show_welcome()
        if not live:
            await self._shorten()
        self._earlier.count(self._first)

    async def _shorten(self) -> None:
        """Remove old turns of a conversation that has grown long, while the end is followed."""
        if len(self._views) <= MOST_DRAWN or not self._follows or self.focused_view is not None:
            return
        gone, self._views = self._views[:-WINDOW], self._views[-WINDOW:]
        self._first += len(gone)
        above = self.children[: self.children.index(self._views[0])]
        await self.remove_children([each for each in above if each not in self._fixed])

    def _same(self, path: list[int], shown: list[int | None]) -> int:
        """Number of drawn turns, from the first, that stay."""
        there = path[self._first : self._first + len(shown)]
        pairs = zip(there, shown, strict=False)
        return next((place for place, (wanted, has) in enumerate(pairs) if wanted != has), len(there))

    def _turn(self, number: int) -> DrawnTurn:
        turn, version = self._conversation.turns[number], self._versions.get(number, "")
        message = turn.message
        text = message.role, message.shown, message.thought, message.complete
        facts = short_name(turn.model), reply_facts(turn.stats)
        return DrawnTurn(number, *text, version, *facts, message.attached_texts(), message.rounds)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Show earlier turns when the user scrolls to the top."""
        super().watch_scroll_y(old_value, new_value)
        if new_value <= 0 < old_value and self._first and not self._syncing and not self._follows:
            self.call_later(self.show_earlier)

    @property
    def _follows(self) -> bool:
        """True if the view follows the end."""
        return self._anchored and not self._anchor_released

    async def show_earlier(self) -> None:
        """Draw the WINDOW turns before the first, without moving the visible part."""
        path = self._conversation.path()
        first = max(0, self._first - WINDOW)
        self._versions |= self._conversation.versions(path[first : self._first])
        added = [TurnView(self._turn(number)) for number in path[first : self._first]]
        if not added:
            return
        before, seen_y, self._syncing = self.virtual_size.height, self.scroll_y, True
        self._first, self._views = first, added + self._views
        await self.mount_all(added, after=self.welcome)
        self._earlier.count(first)
        self._syncing = False

        def stay() -> None:
            if not self._follows:  # it may follow the end by now
                # at once: a later scroll would cancel following the end
                self.scroll_to(y=seen_y + self.virtual_size.height - before, animate=False, immediate=True)

        self.call_after_refresh(stay)

    async def begin(self, reading: bool, model: str = "") -> TurnView:
        """Add an empty reply of `model` that will stream. reading: focus it, because a turn had the focus."""
        view = TurnView(DrawnTurn(None, "assistant", "", model=short_name(model)))
        self.welcome.display = False
        await self.mount(view)
        view.fold(self.folded)
        if reading:
            self.screen.set_focus(view)
        return view

    async def end_reply(self, view: TurnView, conversation: Conversation) -> None:
        """End a streamed reply: it is the last turn of the path now, or was empty."""
        path = conversation.path()
        number = path[-1] if path else None
        shown = [each.turn.number for each in self._views]
        if number is None or number in shown or conversation.turns[number].message.role == "user":
            await view.remove()
        else:
            self._conversation, self._versions = conversation, conversation.versions([number])
            self._views.append(view)
            await view.end(self._turn(number))
        await self.sync(conversation)

    async def notice(self, text: str, failed: bool = False) -> None:
        """Add a notice at the end; the welcome stays above it until the first turn."""
        await self.mount(Notice(text, failed))
        self._show_welcome()

    def _show_welcome(self) -> None:
        """Show the welcome until there is a turn: notices go below it, and leave it the room that it needs."""
        self.welcome.display = not any(isinstance(each, TurnView) for each in self.children)
        self.welcome.set_class(any(isinstance(each, Notice) for each in self.children), "-noticed")

    def toggle_thinking(self) -> None:
        """Show or hide all thoughts."""
        self.folded = not self.folded
        for view in self.query(TurnView):
            view.fold(self.folded)

    # ---- moving

    @property
    def focused_view(self) -> TurnView | None:
        """The turn that has the focus, or contains it."""
        focused = self.screen.focused
        if focused is None:
            return None
        return next((each for each in focused.ancestors_with_self if isinstance(each, TurnView)), None)

    def focus_last(self) -> None:
        """Focus the last turn."""
        if views := list(self.query(TurnView)):
            views[-1].focus()

    def focus_turn(self, number: int) -> None:
        """Focus a turn, if it is drawn."""
        for view in self._views:
            if view.turn.number == number:
                view.focus()

    def _step(self, by: int) -> None:
        views = list(self.query(TurnView))
        here = self.focused_view
        place = (views.index(here) if here in views else len(views) if by < 0 else -1) + by
        if place >= len(views):
            self.post_message(self.WriteRequested())
        elif place < 0 and self._earlier.display:
            self._earlier.focus()
        elif views:
            views[max(place, 0)].focus()

    def action_turn_before(self) -> None:
        """Focus the previous turn."""
        self._step(-1)

    def action_turn_after(self) -> None:
        """Focus the next turn, then the prompt."""
        self._step(1)

    def action_line_up(self) -> None:
        """Scroll up one line."""
        self.scroll_up(animate=False)

    def action_line_down(self) -> None:
        """Scroll down one line."""
        self.scroll_down(animate=False)

    def action_first(self) -> None:
        """Scroll to the first drawn turn, which shows earlier ones."""
        self.release_anchor()
        self.scroll_home(animate=False, immediate=True)

    def action_last(self) -> None:
        """Go to the end and follow it."""
        self.anchor()
        self.focus_last()

    def action_write(self) -> None:
        """Focus the prompt."""
        self.post_message(self.WriteRequested())

    # ---- a turn

    def _want(self, what: str, step: int = 0) -> None:
        view = self.focused_view
        if view is not None and view.turn.number is not None:
            self.post_message(self.TurnRequested(view.turn.number, what, step))

    def action_edit(self) -> None:
        """Edit the turn."""
        self._want("edit")

    def action_regenerate(self) -> None:
        """Regenerate the reply."""
        self._want("regenerate")

    def action_branch_before(self) -> None:
        """Switch to the previous version."""
        self._want("version", -1)

    def action_branch_after(self) -> None:
        """Switch to the next version."""
        self._want("version", 1)

    def action_copy_turn(self) -> None:
        """Copy the turn."""
        view = self.focused_view
        if view is not None:
            from localq.tui.reply.reply_text import CopyRequested  # start-up cost

            self.post_message(CopyRequested(view.turn.text))

    async def on_earlier_turns_requested(self) -> None:
        """Show earlier turns."""
        self.release_anchor()
        await self.show_earlier()


def reply_facts(stats: Stats | None) -> tuple[str, ...]:
    """Speed and seconds of a reply, from the request to its end; empty where they are unknown."""
    if stats is None:
        return ()
    seconds = stats.time_to_first_token_s + stats.decode_s
    speed = f"{stats.tokens_per_s:.1f} tok/s" if stats.tokens_per_s else ""
    return tuple(filter(None, (speed, f"{seconds:.1f} s" if seconds else "")))


def is_live(widget: Widget) -> bool:
    """Return whether `widget` is a streaming reply."""
    return isinstance(widget, TurnView) and widget.turn.number is None
