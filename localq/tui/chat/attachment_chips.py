"""Attachments of a message on the screen: a chip each (name, size, tokens), folded; Enter or a click shows the text."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from localq.chat.attachments import AttachedFile
from localq.sanitize import sanitize

MOST_CHARACTERS = 20_000  # drawn of an attachment


class _ChipLine(Static, can_focus=True):
    """The line of a chip; Enter and a click unfold it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "unfold", "show or hide the file", show=False)]

    def action_unfold(self) -> None:
        """Show or hide the text."""
        chip = self.parent
        if isinstance(chip, Chip):
            chip.toggle()

    def on_click(self) -> None:
        """Same as Enter."""
        self.action_unfold()


class Chip(Vertical):
    """A folded text: its title, and the text while it is unfolded."""

    DEFAULT_CSS = """
    Chip { height: auto; }
    Chip > _ChipLine { width: auto; max-width: 100%; padding: 0 1; background: $surface; color: $text-muted; }
    Chip > _ChipLine:focus { background: $primary-muted; color: $text; text-style: bold; }
    Chip > .attached { padding: 0 0 0 2; color: $text-muted; height: auto; }
    """

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title, self._text = " ".join(sanitize(title).split()), text
        self._body: Static | None = None

    def compose(self) -> ComposeResult:
        """The line alone: a text costs time at every layout."""
        yield _ChipLine(self._line())

    def toggle(self) -> None:
        """Show or hide the text."""
        if self._body is None:
            self._body = Static(Content(_shortened(sanitize(self._text))), classes="attached")
            self.mount(self._body)
        else:
            self._body.remove()
            self._body = None
        self.query_one(_ChipLine).update(self._line())

    def _line(self) -> Content:
        return Content(f"{'▶' if self._body is None else '▼'} {self._title}")


class AttachmentChip(Chip):
    """One attached file."""

    def __init__(self, file: AttachedFile, text: str) -> None:
        super().__init__(file.summary, text)


def chips(attached: tuple[tuple[AttachedFile, str], ...]) -> list[AttachmentChip]:
    """The chips of a message: files with their texts."""
    return [AttachmentChip(file, text) for file, text in attached]


def _shortened(text: str) -> str:
    """`text` up to MOST_CHARACTERS, with a note on the rest."""
    rest = len(text) - MOST_CHARACTERS
    return text if rest <= 0 else f"{text[:MOST_CHARACTERS]}\n({rest:,} more characters not shown)"
