"""The sidebar: place of the list of conversations, which is created when first shown (start-up cost)."""

from __future__ import annotations

from textual.containers import Vertical

from localq.chat.history.store import ConversationStore


class Sidebar(Vertical):
    """At the side of the conversation, or in its place on a narrow screen."""

    async def open(self, store: ConversationStore, current: int | None, unsaved: str, search: bool = False) -> None:
        """Show the conversations of `store` and focus the list or the search; `current` is marked.

        unsaved: why the open conversation is not saved, if it is not
        """
        from localq.tui.chat.sessions_panel import SessionsPanel

        if not self.children:
            await self.mount(SessionsPanel(store, current, unsaved))
        else:
            self.query_one(SessionsPanel).refresh_list(current, unsaved)
        self.query("#search" if search else "#list").focus()

    def reload(self, current: int | None, unsaved: str) -> None:
        """Reload the list, if it was ever shown; as `open`."""
        if self.children:
            from localq.tui.chat.sessions_panel import SessionsPanel

            self.query_one(SessionsPanel).refresh_list(current, unsaved)
