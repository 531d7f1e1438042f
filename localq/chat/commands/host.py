"""`Host`: what slash commands need from the front end."""

from __future__ import annotations

from typing import Protocol


class Host(Protocol):
    """A front end: the line chat, the TUI, or a test."""

    def copy(self, text: str) -> str:
        """Put `text` on the clipboard; return a notice."""

    def edit(self, text: str, otherwise: str) -> str:
        """Return `text` as edited by the user. Raises LocalqError, with the advice `otherwise` without one."""

    def set_markdown(self, wanted: bool | None) -> bool:
        """Turn Markdown rendering on or off (None: leave it); return whether it is on."""

    def show(self, text: str, remark: str) -> str:
        """Show a long text, such as an export; return the notice below it."""
