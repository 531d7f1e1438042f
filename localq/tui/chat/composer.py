"""The prompt: several lines, history, completion, external editor. The screen handles its messages."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.message import Message
from textual.widgets import TextArea

from localq.chat.terminal.input_history import InputHistory
from localq.sanitize import sanitize
from localq.tui.key_line import chosen_keys, content, hints
from localq.tui.keys import bindings
from localq.tui.terminal.input_priority import TakesInputFirst, is_typed
from localq.tui.terminal.terminal_app import InputPriorityScreen

PLACEHOLDER = "Message, or / for commands"
QUOTES = '"' * 3
LONGEST = 20_000  # characters of a line that is wrapped: Textual (8.2) measures all of it at every key


class Composer(TakesInputFirst, TextArea):
    """A text field of 1 to 10 rows that grows with its text."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings("send", "newline", "editor", "complete", "older", "newer", "leave"),
    ]

    class Sent(Message):
        """A message or command was sent."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class EditorRequested(Message):
        """Open the text in an editor."""

    class LeaveRequested(Message):
        """Ctrl-D on an empty prompt."""

    class WordTyped(Message):
        """The word before the cursor has changed."""

        def __init__(self, word: str, at_beginning: bool) -> None:
            super().__init__()
            self.word, self.at_beginning = word, at_beginning

    class CompletionMoved(Message):
        """Up (-1) or down (1) in the list of completions."""

        def __init__(self, by: int) -> None:
            super().__init__()
            self.by = by

    class CompletionTaken(Message):
        """Use the highlighted completion."""

    def __init__(self, past: InputHistory, id: str | None = None) -> None:
        super().__init__(
            id=id,
            soft_wrap=True,
            show_line_numbers=False,
            highlight_cursor_line=False,
        )
        self.past = past
        self._completing = False
        self._word = ""
        self._keys: list[tuple[str, str, str]] = []

    def on_resize(self, event: events.Resize) -> None:
        """The placeholder, where it fits; Textual fails to draw it in zero columns. And the keys."""
        self.placeholder = PLACEHOLDER if event.size.width > 9 else ""
        self._draw_keys()

    @property
    def completing(self) -> bool:
        """True while a list of completions is open; its keys are shown then."""
        return self._completing

    @completing.setter
    def completing(self, is_open: bool) -> None:
        if is_open != self._completing:
            self._completing = is_open
            self._draw_keys()

    def show_keys(self, found: list[tuple[str, str, str]]) -> None:
        """Show keys, from `key_line.hints`, in the lower border."""
        if found != self._keys:
            self._keys = found
            self._draw_keys()

    def _draw_keys(self) -> None:
        of_list = hints(chosen_keys(self.app), ("send", "stop"), send="choose", stop="close the list")
        self.border_subtitle = content(
            of_list if self._completing else self._keys, self.size.width - 2, clickable=False
        )

    # ---- typing

    async def on_event(self, event: events.Event) -> None:
        """As Textual's, but draw typed keys at once."""
        await super().on_event(event)
        if is_typed(event) and isinstance(self.screen, InputPriorityScreen):
            self.screen.draw_first(self)

    async def _on_key(self, event: events.Key) -> None:
        """Run the binding of a key here: through the screen, as in Textual, letters typed later can overtake it."""
        if event.key == "enter":  # its action is a binding, which the user may change
            event.prevent_default()
        if not event.is_printable:
            found = self.screen.active_bindings.get(event.key)
            if found is None or found.node is not self or not found.enabled:
                return
            # Unhandled keys go to the screen: Ctrl-C copies a selection, or stops a reply.
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
        """The word before the cursor."""
        row, column = self.cursor_location
        before = self.document[row][:column]
        return before[max(before.rfind(" "), before.rfind("\t")) + 1 :]

    def replace_word(self, text: str) -> None:
        """Replace the word before the cursor."""
        row, column = self.cursor_location
        self.replace(text, (row, column - len(self.word())), (row, column))

    def on_text_area_changed(self) -> None:
        """Post `WordTyped` where the word has changed."""
        if not self.soft_wrap:  # the long line may be gone
            self._break_lines_of(self.text)
        row, column = self.cursor_location
        word = self.word()
        if word != self._word:
            self._word = word
            self.post_message(self.WordTyped(word, row == 0 and column == len(word)))

    def _break_lines_of(self, text: str) -> None:
        """Wrap lines, unless one is longer than LONGEST."""
        self.soft_wrap = max(map(len, text.split("\n"))) <= LONGEST

    def put(self, text: str) -> None:
        """Show `text`, with the cursor at its end."""
        self._break_lines_of(text)
        self.text = text
        self.move_cursor(self.document.end)

    # ---- what keys do

    def action_send(self) -> None:
        """Post the text and clear the prompt; here, because the receiver may lag behind the keys."""
        if self.completing:
            self.post_message(self.CompletionTaken())
        elif self.cursor_location == self.document.end and is_open(self.text):
            if self.text.endswith("\\"):
                self.action_delete_left()
            self.action_newline()
        elif (text := unquote(self.text)).strip():
            self.put("")
            self.post_message(self.Sent(text))

    def give_back(self, text: str) -> None:
        """Put back a text that was not accepted, before what was typed since."""
        self.put(text + self.text)

    def action_newline(self) -> None:
        """Insert a line end."""
        self._replace_via_keyboard("\n", *self.selection)

    def action_editor(self) -> None:
        """Open an editor."""
        self.post_message(self.EditorRequested())

    def action_complete(self) -> None:
        """Use the highlighted completion, or focus the next widget."""
        if self.completing:
            self.post_message(self.CompletionTaken())
        else:
            self.screen.focus_next()

    def action_leave(self) -> None:
        """Quit on an empty prompt, else delete to the right."""
        if self.text:
            self.action_delete_right()
        else:
            self.post_message(self.LeaveRequested())

    def action_older(self) -> None:
        """Up: in completions, in the text, or to the previous message."""
        if self.completing:
            self.post_message(self.CompletionMoved(-1))
        elif self.cursor_at_first_line and (found := self.past.older(self.text)) is not None:
            self.put(found)
        else:
            self.action_cursor_up()

    def action_newer(self) -> None:
        """Down: in completions, in the text, or to the next message."""
        if self.completing:
            self.post_message(self.CompletionMoved(1))
        elif self.cursor_at_last_line and (found := self.past.newer()) is not None:
            self.put(found)
        else:
            self.action_cursor_down()


def is_open(text: str) -> bool:
    """Return whether more lines follow: after a backslash, or within triple quotes (code has them in pairs)."""
    return text.endswith("\\") or (text.lstrip().startswith(QUOTES) and text.count(QUOTES) % 2 == 1)


def unquote(text: str) -> str:
    """`text` without triple quotes around all of it."""
    inner = text.strip()
    if inner.startswith(QUOTES) and inner.endswith(QUOTES) and inner.count(QUOTES) == 2:
        return inner.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text
