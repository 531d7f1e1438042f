"""The app as its screens, dialogs and jobs see it: settings, start, quitting, the editor."""

from __future__ import annotations

from abc import abstractmethod

from localq.chat.open_conversation import Start
from localq.errors import ExitCode
from localq.settings import Settings
from localq.tui.terminal.terminal_app import TerminalApp


class ChatApp(TerminalApp):
    """Base of `tui.app.LocalqApp`, so that screens need not import the app that shows them."""

    settings: Settings
    start_with: Start

    @property
    @abstractmethod
    def decided(self) -> dict[str, str]:
        """Settings in force that a project's file has decided, and its path."""

    @abstractmethod
    def leave(self, code: int = ExitCode.OK) -> None:
        """Exit with `code`; a running reply is stopped and saved first."""

    @abstractmethod
    def edit_text(self, text: str, otherwise: str) -> str:
        """Return `text` as edited in the user's editor. Raises LocalqError with the advice `otherwise`."""

    @abstractmethod
    def action_help(self) -> None:
        """Open or close the list of keys and commands."""
