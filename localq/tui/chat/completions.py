"""The list of completions above the prompt."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option


class Completions(OptionList, can_focus=False):
    """Completions of the current word; hidden while there are none."""

    class Chosen(Message):
        """`text` was chosen, to replace the word."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.display = False
        self._texts: list[str] = []

    def offer(self, found: list[tuple[str, str]]) -> None:
        """Show these, the first highlighted; an empty list hides the widget."""
        self.clear_options()
        self._texts = [text for text, _ in found]
        self.display = bool(found)
        width = max((cell_len(text) for text, _ in found), default=0)
        self.add_options(Option(Content(f"{set_cell_size(text, width)}  {what}")) for text, what in found)
        if found:
            self.highlighted = 0

    def move(self, by: int) -> None:
        """Move the highlight, wrapping around."""
        if self._texts:
            self.highlighted = ((self.highlighted or 0) + by) % len(self._texts)

    def highlighted_text(self) -> str | None:
        """The highlighted text."""
        return self._texts[self.highlighted] if self._texts and self.highlighted is not None else None

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """A click."""
        event.stop()
        self.post_message(self.Chosen(self._texts[event.option_index]))


def command_completions(word: str) -> list[tuple[str, str]]:
    """See `commands.completion`."""
    from localq.chat.commands import completion  # start-up cost

    return completion.command_completions(word)


def file_completions(word: str) -> list[tuple[str, str]]:
    """See `commands.completion`. Reads the disk."""
    from localq.chat.commands import completion  # as above

    return completion.file_completions(word)
