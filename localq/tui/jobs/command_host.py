"""The TUI as host of slash commands. Commands run in a thread, so calls go to the app's thread."""

from __future__ import annotations

from localq.chat.terminal import clipboard
from localq.errors import usage_error
from localq.sanitize import sanitize
from localq.tui.jobs.chat_app import ChatApp


class TuiHost:
    """Implements `chat.commands.host.Host` over the app."""

    def __init__(self, app: ChatApp) -> None:
        self._app = app

    def copy(self, text: str) -> str:
        """Copy to the terminal's clipboard."""
        text = sanitize(text)  # it may be pasted into a terminal
        if clipboard.copy_sequence(text) is None:
            raise usage_error("copy", clipboard.TOO_LONG, "Write the conversation to a file with /export md FILE.")
        self._app.call_from_thread(self._app.copy_to_clipboard, text)
        return clipboard.copied_notice(text)

    def edit(self, text: str, otherwise: str) -> str:
        """Edit in $VISUAL or $EDITOR, with the TUI suspended."""
        return self._app.call_from_thread(self._app.edit_text, text, otherwise)

    def set_markdown(self, wanted: bool | None) -> bool:
        """Return True; full-screen mode always renders Markdown."""
        if wanted is False:
            step = "For unformatted replies, use `localq chat --plain --no-markdown`."
            raise usage_error("/markdown off", "full-screen mode always renders Markdown", step)
        return True

    def show(self, text: str, remark: str) -> str:
        """Show as a notice in the conversation."""
        return f"{text}\n{remark}"
