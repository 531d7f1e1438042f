"""What slash commands need of the front end that they are typed into."""

from __future__ import annotations

from typing import Protocol


class Host(Protocol):
    """The line chat, the TUI, or a test."""

    def copy(self, text: str) -> str:
        """Put `text` on the clipboard; returns what to tell."""

    def edited(self, text: str, otherwise: str) -> str:
        """`text` as the user leaves it in an editor. `otherwise`: what to do where there is none (LocalqError)."""

    def draws(self, wanted: bool | None) -> bool:
        """Whether replies are drawn as Markdown, from now on as `wanted` where that is not None."""

    def show(self, text: str, remark: str) -> str:
        """Print a text that is the answer itself, such as an export; returns what to tell besides."""
