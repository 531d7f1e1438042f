"""Where the list of conversations stands: it is made when it is first shown, since it costs start-up time."""

from __future__ import annotations

from textual.containers import Vertical

from localq.chat.history.store import ConversationStore


class Sidebar(Vertical):
    """Beside the conversation, or in its place where the screen is narrow."""

    async def open(self, store: ConversationStore, current: int | None, search: bool = False) -> None:
        """The conversations of `store`, with the focus on them or on their search; `current` is marked."""
        from localq.tui.chat.sessions_panel import SessionsPanel

        if not self.children:
            await self.mount(SessionsPanel(store, current))
        else:
            self.query_one(SessionsPanel).refresh_list(current)
        self.query("#search" if search else "#list").focus()

    def reload(self, current: int | None) -> None:
        """Something was saved; nothing where the list was never shown."""
        if self.children:
            from localq.tui.chat.sessions_panel import SessionsPanel

            self.query_one(SessionsPanel).refresh_list(current)
