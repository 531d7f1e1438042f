"""One turn on the screen: headline with model, speed and version, thought, text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Collapsible, Static

from localq.chat.attachments import AttachedFile
from localq.chat.history.tool_rounds import ToolRound
from localq.sanitize import sanitize
from localq.tui.chat.attachment_chips import chips
from localq.tui.chat.round_view import RoundView
from localq.tui.chat.status_line import short_name
from localq.tui.reply.repeated_row import RepeatedRow

if TYPE_CHECKING:  # start-up cost: it imports Markdown
    from localq.tui.reply.reply_text import ReplyText

MOST_CHARACTERS = 20_000  # drawn of a user message; it may contain a whole file


@dataclass(frozen=True)
class DrawnTurn:
    """Content of a turn.

    number   in the conversation, None while it streams
    version  "2 of 3" or ""
    model    short name of the model of a reply, "" if unknown
    facts    of a reply: "37.4 tok/s", "12.4 s"
    attached files of a user message, with their texts
    rounds   of a reply: parts before `thought` and `text` that ended in tool calls
    """

    number: int | None
    role: str
    text: str
    thought: str = ""
    complete: bool = True
    version: str = ""
    model: str = ""
    facts: tuple[str, ...] = ()
    attached: tuple[tuple[AttachedFile, str], ...] = ()
    rounds: tuple[ToolRound, ...] = ()


class TurnView(RepeatedRow, Vertical, can_focus=True):
    """The widget of a turn. A reply may stream: `grow`, then `end`."""

    def __init__(self, turn: DrawnTurn) -> None:
        super().__init__(classes=turn.role)
        self.turn = turn
        self._thought, self._thinking = sanitize(turn.thought), False
        self._has_text = False  # some text has arrived
        self._pointed = False
        self._collapsed = True
        self._phase = ""  # of a reply that streams

    def compose(self) -> ComposeResult:
        """The headline, then the text."""
        from localq.tui.reply.reply_text import ReplyText  # start-up cost: it imports Markdown

        yield Static(self._headline(), classes="headline")
        yield from chips(self.turn.attached)
        if self.turn.role == "user":
            yield Static(Content(truncate(sanitize(self.turn.text))), classes="message")
            return
        yield from (RoundView(each, self._collapsed) for each in self.turn.rounds)
        if self._thought:
            yield self._folded()
        yield ReplyText(sanitize(self.turn.text))

    def _reply_text(self) -> ReplyText:
        """The text after the last round."""
        from localq.tui.reply.reply_text import ReplyText  # as above

        return self.query_children(ReplyText).last(ReplyText)

    def _folded(self) -> Collapsible:
        thought = Static(Content(self._thought), classes="thought")
        return Collapsible(thought, title=self._title(), collapsed=self._collapsed)

    def _headline(self) -> Content:
        turn = self.turn
        who = "You" if turn.role == "user" else turn.model or "Reply"
        marks = [self._phase, *turn.facts, turn.version, "" if turn.complete else "cut"]
        style = "bold $text-primary" if turn.role == "user" else "bold $text-accent"
        rest = "".join(f" · {each}" for each in marks if each)
        return Content.assemble("▶ " if self._pointed else "  ", (who, style), rest)

    def _title(self) -> str:
        return f"{'thinking' if self._thinking else 'thought'} ({len(self._thought.split())} words)"

    def on_focus(self) -> None:
        """Mark the turn, not only by colour."""
        self._pointed = True
        self._draw_headline()

    def on_blur(self) -> None:
        """Remove the mark."""
        self._pointed = False
        self._draw_headline()

    def _draw_headline(self) -> None:
        """Update the headline, if it exists: the focus may come before `compose`. Its height never changes."""
        for line in self.query_children(".headline").results(Static):
            line.update(self._headline(), layout=False)

    @property
    def is_empty(self) -> bool:
        """True if no text has arrived."""
        return not self._has_text and not self._thought and not self.turn.text and not self.turn.rounds

    def show(self, turn: DrawnTurn) -> None:
        """Update number, version or end of the same text."""
        if turn != self.turn:
            self.turn = turn
            self._draw_headline()

    # ---- a reply that streams

    def show_phase(self, phase: str) -> None:
        """Show what a reply that streams is doing, such as "processing the prompt 40%"."""
        if phase != self._phase:
            self._phase = phase
            self._draw_headline()

    def name_model(self, model: str) -> None:
        """Show the model of a reply that began before it was loaded."""
        if not self.turn.model:
            self.turn = replace(self.turn, model=short_name(model))
            self._draw_headline()

    async def grow(self, thought: str, text: str) -> None:
        """Append to thought and text; return when they are drawn."""
        if thought:
            self._thought, self._thinking = self._thought + thought, True
            await self._draw_thought()
        if text:
            if self._thinking:
                self._thinking = False
                await self._draw_thought()
            self._has_text = True
            await self._reply_text().append(text)

    async def end_round(self, round: ToolRound) -> None:
        """The thought and text so far have ended in tool calls: draw them above what follows."""
        from localq.tui.reply.reply_text import ReplyText  # as above

        self.turn = replace(self.turn, rounds=(*self.turn.rounds, round))
        self._thought, self._thinking, self._has_text = "", False, False
        old = [*self.query_children(Collapsible), self._reply_text()]
        await self.mount_all([RoundView(round, self._collapsed), ReplyText()])
        for each in old:
            await each.remove()

    async def end(self, turn: DrawnTurn) -> None:
        """End the reply: show the final text."""
        self._thought, self._thinking, self._phase = sanitize(turn.thought), False, ""
        for missing in turn.rounds[len(self.turn.rounds) :]:
            await self.end_round(missing)
            self._thought = sanitize(turn.thought)
        await self._draw_thought()
        await self._reply_text().settle(sanitize(turn.text))
        self.show(turn)

    async def _draw_thought(self) -> None:
        found = self.query_children(Collapsible)
        if found:  # created on demand: every widget costs time at every layout
            thought = found.last(Collapsible)
            thought.title = self._title()
            thought.query_one(".thought", Static).update(Content(self._thought))
        elif self._thought:
            await self.mount(self._folded(), before=self._reply_text())

    def fold(self, collapsed: bool) -> None:
        """Show or hide the thought."""
        self._collapsed = collapsed
        for folded in self.query(Collapsible):
            folded.collapsed = collapsed


def truncate(text: str) -> str:
    """`text` up to MOST_CHARACTERS, with a note on the rest."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n({len(text) - MOST_CHARACTERS:,} more characters not shown)"
