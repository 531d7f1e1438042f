"""The line chat as slash commands see it: its clipboard, its editor, its stdout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from localq.chat.terminal import editor
from localq.cli.line import clipboard
from localq.sanitize import sanitize


class TerminalHost:
    """A terminal, or a pipe. aside: within, another program has the terminal. markdown: a terminal draws replies."""

    def __init__(
        self, aside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext, markdown: bool = True
    ) -> None:
        self._aside, self.markdown = aside, markdown

    def copy(self, text: str) -> str:
        """To the terminal's clipboard, or printed."""
        return clipboard.copy(text)

    def edited(self, text: str, otherwise: str) -> str:
        """In $VISUAL or $EDITOR."""
        with self._aside():
            return editor.edited(text, otherwise)

    def draws(self, wanted: bool | None) -> bool:
        """From the next reply on."""
        self.markdown = self.markdown if wanted is None else wanted
        return self.markdown

    def show(self, text: str, remark: str) -> str:
        """On stdout."""
        print(sanitize(text), flush=True)
        return remark
