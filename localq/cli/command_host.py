"""The line chat as slash commands see it: its clipboard, its editor, its stdout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from localq import editor
from localq.cli import clipboard
from localq.sanitize import sanitize


class TerminalHost:
    """A terminal, or a pipe. aside: within, another program has the terminal."""

    def __init__(self, aside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext) -> None:
        self._aside = aside

    def copy(self, text: str) -> str:
        """To the terminal's clipboard, or printed."""
        return clipboard.copy(text)

    def edited(self, text: str, otherwise: str) -> str:
        """In $VISUAL or $EDITOR."""
        with self._aside():
            return editor.edited(text, otherwise)

    def show(self, text: str, remark: str) -> str:
        """On stdout."""
        print(sanitize(text), flush=True)
        return remark
