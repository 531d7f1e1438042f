"""The TUI as slash commands see it. They run in a thread, so everything here asks the app's own thread."""

from __future__ import annotations

from localq.chat.terminal import clipboard as osc52
from localq.errors import usage_error
from localq.sanitize import sanitize
from localq.tui.jobs.chat_app import ChatApp


class TuiHost:
    """A `commands.Host` over the app."""

    def __init__(self, app: ChatApp) -> None:
        self._app = app

    def copy(self, text: str) -> str:
        """To the terminal's clipboard."""
        text = sanitize(text)  # whatever pastes it may be a terminal
        if osc52.copy_sequence(text) is None:
            raise usage_error("copy", osc52.TOO_LONG, "/export md FILE writes the conversation to a file.")
        self._app.call_from_thread(self._app.copy_to_clipboard, text)
        return osc52.copied_notice(text)

    def edit(self, text: str, otherwise: str) -> str:
        """In $VISUAL or $EDITOR, while the TUI stands back."""
        return self._app.call_from_thread(self._app.edit_text, text, otherwise)

    def set_markdown(self, wanted: bool | None) -> bool:
        """Always."""
        if wanted is False:
            step = "`localq chat --plain --no-markdown` prints replies as they are written."
            raise usage_error("/markdown off", "the full screen draws every reply", step)
        return True

    def show(self, text: str, remark: str) -> str:
        """In the conversation, as a notice."""
        return f"{text}\n{remark}"
