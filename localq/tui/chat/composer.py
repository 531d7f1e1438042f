"""Where a message is written: several lines, history, completion of commands and file names, an external editor.

Knows what is typed, and posts it; what a message means is the screen's business.
"""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.message import Message
from textual.widgets import TextArea

from localq.chat.terminal.input_history import InputHistory
from localq.sanitize import sanitize
from localq.tui.keys import bindings
from localq.tui.terminal.input_priority import TakesInputFirst, is_typed
from localq.tui.terminal.terminal_app import InputPriorityScreen

PLACEHOLDER = "Message, or / for commands"
QUOTES = '"' * 3
LONGEST = 20_000  # characters of a line that is broken into rows: Textual (8.2) counts all of it again at every key


class Composer(TakesInputFirst, TextArea):
    """A text of 1 to 10 rows; grows with what is in it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings("send", "newline", "editor", "complete", "older", "newer", "leave"),
    ]

    class Sent(Message):
        """A message, or a line that begins with a slash."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class EditorRequested(Message):
        """The text is to be opened in an editor."""

    class LeaveRequested(Message):
        """Ctrl-D where nothing is written."""

    class WordTyped(Message):
        """The word before the cursor is another than before; `start` is its column on the line of the cursor."""

        def __init__(self, word: str, at_beginning: bool) -> None:
            super().__init__()
            self.word, self.at_beginning = word, at_beginning

    class CompletionMoved(Message):
        """Up (-1) or down (1) in the list of completions."""

        def __init__(self, by: int) -> None:
            super().__init__()
            self.by = by

    class CompletionTaken(Message):
        """The completion that is marked is to be taken."""

    def __init__(self, past: InputHistory, id: str | None = None) -> None:
        super().__init__(
            id=id,
            soft_wrap=True,
            show_line_numbers=False,
            highlight_cursor_line=False,
        )
        self.past = past
        self.completing = False  # a list of completions is open
        self._word = ""

    def on_resize(self, event: events.Resize) -> None:
        """What stands in an empty message; Textual cannot draw it in no columns at all, nor in few as words."""
        self.placeholder = PLACEHOLDER if event.size.width > 9 else ""

    # ---- typing

    async def on_event(self, event: events.Event) -> None:
        """Textual's; what is typed is seen at once."""
        await super().on_event(event)
        if is_typed(event) and isinstance(self.screen, InputPriorityScreen):
            self.screen.draw_first(self)

    async def _on_key(self, event: events.Key) -> None:
        """What a key is bound to is done here and now: by way of the screen, where Textual does it, letters that were
        typed behind it come before it when the screen is behind."""
        if event.key == "enter":  # what it does is a binding, which the user may have changed
            event.prevent_default()
        if not event.is_printable:
            found = self.screen.active_bindings.get(event.key)
            if found is None or found.node is not self or not found.enabled:
                return
            # What is not done is for the screen: Ctrl-C copies what is selected, or stops a reply.
            if await self.app.run_action(found.binding.action, self):
                event.stop()
                event.prevent_default()

    async def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        text = sanitize(event.text.replace("\r\n", "\n").replace("\r", "\n"))
        self._break_lines_of(self.text + text)
        if result := self._replace_via_keyboard(text, *self.selection):
            self.move_cursor(result.end_location)

    def word(self) -> str:
        """What stands between the last blank and the cursor."""
        row, column = self.cursor_location
        before = self.document[row][:column]
        return before[max(before.rfind(" "), before.rfind("\t")) + 1 :]

    def replace_word(self, text: str) -> None:
        """Put `text` in its place."""
        row, column = self.cursor_location
        self.replace(text, (row, column - len(self.word())), (row, column))

    def on_text_area_changed(self) -> None:
        """Tell of another word under the cursor."""
        if not self.soft_wrap:  # what was too long may be deleted
            self._break_lines_of(self.text)
        row, column = self.cursor_location
        word = self.word()
        if word != self._word:
            self._word = word
            self.post_message(self.WordTyped(word, row == 0 and column == len(word)))

    def _break_lines_of(self, text: str) -> None:
        """Into rows, or, where one is too long for that, not at all."""
        self.soft_wrap = max(map(len, text.split("\n"))) <= LONGEST

    def put(self, text: str) -> None:
        """Show `text`, the cursor behind it."""
        self._break_lines_of(text)
        self.text = text
        self.move_cursor(self.document.end)

    # ---- what keys do

    def action_send(self) -> None:
        """Post what is written and begin anew: here, for whoever takes it may be behind the keys."""
        if self.completing:
            self.post_message(self.CompletionTaken())
        elif self.cursor_location == self.document.end and is_open(self.text):
            if self.text.endswith("\\"):
                self.action_delete_left()
            self.action_newline()
        elif (text := unquoted(self.text)).strip():
            self.put("")
            self.post_message(self.Sent(text))

    def give_back(self, text: str) -> None:
        """It was not taken: it stands where it was, before what was typed since."""
        self.put(text + self.text)

    def action_newline(self) -> None:
        """Break the line."""
        self._replace_via_keyboard("\n", *self.selection)

    def action_editor(self) -> None:
        """Ask for an editor."""
        self.post_message(self.EditorRequested())

    def action_complete(self) -> None:
        """Take the completion that is marked."""
        if self.completing:
            self.post_message(self.CompletionTaken())
        else:
            self.screen.focus_next()

    def action_leave(self) -> None:
        """Leave where nothing is written, else delete to the right."""
        if self.text:
            self.action_delete_right()
        else:
            self.post_message(self.LeaveRequested())

    def action_older(self) -> None:
        """Up: in the list of completions, in the text, or to the message before."""
        if self.completing:
            self.post_message(self.CompletionMoved(-1))
        elif self.cursor_at_first_line and (found := self.past.older(self.text)) is not None:
            self.put(found)
        else:
            self.action_cursor_up()

    def action_newer(self) -> None:
        """Down, likewise."""
        if self.completing:
            self.post_message(self.CompletionMoved(1))
        elif self.cursor_at_last_line and (found := self.past.newer()) is not None:
            self.put(found)
        else:
            self.action_cursor_down()


def is_open(text: str) -> bool:
    """More is to come, as in the line chat: behind a backslash, and between triple quotes. Code that has some of its
    own has them in pairs."""
    return text.endswith("\\") or (text.lstrip().startswith(QUOTES) and text.count(QUOTES) % 2 == 1)


def unquoted(text: str) -> str:
    """What stands between the triple quotes, where they are around all of it."""
    inner = text.strip()
    if inner.startswith(QUOTES) and inner.endswith(QUOTES) and inner.count(QUOTES) == 2:
        return inner.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text
