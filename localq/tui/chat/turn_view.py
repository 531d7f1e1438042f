"""One turn of a conversation on the screen: who speaks, what was thought, what was said, and in how many versions."""

from __future__ import annotations

from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Collapsible, Static

from localq.sanitize import sanitize
from localq.tui.reply.repeated_row import RepeatedRow

MOST_CHARACTERS = 20_000  # of a message of the user that are drawn: a file that was pasted is not read here


@dataclass(frozen=True)
class DrawnTurn:
    """What is drawn. number: in the tree of the conversation, None while it streams; version: "2 of 3" or nothing."""

    number: int | None
    role: str
    text: str
    thought: str = ""
    complete: bool = True
    version: str = ""


class TurnView(RepeatedRow, Vertical, can_focus=True):
    """A turn. A reply may stream: `grow`, then `end`."""

    def __init__(self, turn: DrawnTurn) -> None:
        super().__init__(classes=turn.role)
        self.turn = turn
        self._thought, self._thinking = sanitize(turn.thought), False
        self._said = False  # something of it has come
        self._pointed = False
        self._collapsed = True

    def compose(self) -> ComposeResult:
        """The line of who speaks, then the text."""
        from localq.tui.reply.reply_text import ReplyText  # start-up cost: it knows Markdown

        yield Static(self._headline(), classes="headline")
        if self.turn.role == "user":
            yield Static(Content(truncate(sanitize(self.turn.text))), classes="said")
            return
        if self._thought:
            yield self._folded()
        yield ReplyText(sanitize(self.turn.text))

    def _folded(self) -> Collapsible:
        thought = Static(Content(self._thought), classes="thought")
        return Collapsible(thought, title=self._title(), collapsed=self._collapsed)

    def _headline(self) -> Content:
        who = "You" if self.turn.role == "user" else "Reply"
        marks = [self.turn.version, "" if self.turn.complete else "cut"]
        pointer = "▶ " if self._pointed else "  "
        return Content(pointer + " · ".join(filter(None, [who, *marks])))

    def _title(self) -> str:
        return f"{'thinking' if self._thinking else 'thought'}, {len(self._thought.split())} words"

    def on_focus(self) -> None:
        """Mark it, by more than colour."""
        self._pointed = True
        self._draw_headline()

    def on_blur(self) -> None:
        """Take the mark away."""
        self._pointed = False
        self._draw_headline()

    def _draw_headline(self) -> None:
        """If it is there: the focus may come before anything is."""
        for line in self.query(".headline").results(Static):
            line.update(self._headline())

    @property
    def is_empty(self) -> bool:
        """Nothing of it has come."""
        return not self._said and not self._thought and not self.turn.text

    def show(self, turn: DrawnTurn) -> None:
        """Another number, version or end of the same text."""
        if turn != self.turn:
            self.turn = turn
            self._draw_headline()

    # ---- a reply that streams

    async def grow(self, thought: str, text: str) -> None:
        """Put these behind what is there, and return when they are there."""
        from localq.tui.reply.reply_text import ReplyText  # as above

        if thought:
            self._thought, self._thinking = self._thought + thought, True
            await self._draw_thought()
        if text:
            if self._thinking:
                self._thinking = False
                await self._draw_thought()
            self._said = True
            await self.query_one(ReplyText).append(text)

    async def end(self, turn: DrawnTurn) -> None:
        """It is complete: what is drawn now is what is kept."""
        from localq.tui.reply.reply_text import ReplyText  # as above

        self._thought, self._thinking = sanitize(turn.thought), False
        await self._draw_thought()
        await self.query_one(ReplyText).settle(sanitize(turn.text))
        self.show(turn)

    async def _draw_thought(self) -> None:
        from localq.tui.reply.reply_text import ReplyText  # as above

        found = self.query(Collapsible)
        if found:  # most replies have none, and every widget costs time at every layout
            found.first().title = self._title()
            self.query_one(".thought", Static).update(Content(self._thought))
        elif self._thought:
            await self.mount(self._folded(), before=self.query_one(ReplyText))

    def fold(self, collapsed: bool) -> None:
        """Show or hide what was thought."""
        self._collapsed = collapsed
        for folded in self.query(Collapsible):
            folded.collapsed = collapsed


def truncate(text: str) -> str:
    """`text` as far as it is drawn, and how much is not."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n(and {len(text) - MOST_CHARACTERS:,} characters more)"
