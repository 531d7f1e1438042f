"""The sidebar: place of the list of conversations, which is created when first shown (start-up cost)."""

from __future__ import annotations

from textual.containers import Vertical

from localq.chat.history.store import ConversationStore


class Sidebar(Vertical):
    """At the side of the conversation, or in its place on a narrow screen."""

    async def open(self, store: ConversationStore, current: int | None, search: bool = False) -> None:
        """Show the conversations of `store` and focus the list or the search; `current` is marked."""
        from localq.tui.chat.sessions_panel import SessionsPanel

        if not self.children:
            await self.mount(SessionsPanel(store, current))
        else:
            self.query_one(SessionsPanel).refresh_list(current)
        self.query("#search" if search else "#list").focus()

    def reload(self, current: int | None) -> None:
        """Reload the list, if it was ever shown."""
        if self.children:
            from localq.tui.chat.sessions_panel import SessionsPanel

            self.query_one(SessionsPanel).refresh_list(current)
