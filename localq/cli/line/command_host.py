"""Host of slash commands in the line chat: clipboard, editor, stdout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from localq.chat.terminal import editor
from localq.cli.line import clipboard
from localq.cli.output import print_line


class TerminalHost:
    """Host of slash commands at a terminal or a pipe.

    aside      context in which another program uses the terminal
    markdown   draw replies as Markdown
    """

    def __init__(
        self, aside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext, markdown: bool = True
    ) -> None:
        self._aside, self.markdown = aside, markdown

    def copy(self, text: str) -> str:
        """Copy to the terminal's clipboard, or print."""
        return clipboard.copy(text)

    def edit(self, text: str, otherwise: str) -> str:
        """Edit `text` in $VISUAL or $EDITOR."""
        with self._aside():
            return editor.edit(text, otherwise)

    def set_markdown(self, wanted: bool | None) -> bool:
        """Switch Markdown from the next reply on; returns whether it is on."""
        self.markdown = self.markdown if wanted is None else wanted
        return self.markdown

    def show(self, text: str, remark: str) -> str:
        """Print `text` on stdout."""
        print_line(text)
        return remark
