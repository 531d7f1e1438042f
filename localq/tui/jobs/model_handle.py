"""A model as the screens have it: a session over an engine process that can be loaded again and closed, by threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from textual.message import Message

from localq.errors import LocalqError

if TYPE_CHECKING:  # start-up cost
    from localq.chat.session import ChatSession
    from localq.tui.jobs.model_jobs import ReadyModel


class ModelHandle:
    """An open model. `load`, `profile` and `close` block, and are for threads."""

    def __init__(
        self,
        session: ChatSession,
        load: Callable[[], object],
        close: Callable[[], object],
        profile: Callable[[], dict[str, Any]],
    ) -> None:
        self.session, self._load, self._close, self._profile = session, load, close, profile

    def load(self) -> None:
        """Load it unless a living engine process holds it. Raises LocalqError."""
        self._load()

    def profile(self) -> dict[str, Any]:
        """Times of a decode step behind the conversation, which stays: `StepProfile.to_dict()`. Raises LocalqError."""
        return self._profile()

    def close(self) -> None:
        """End the engine process within 2 s, whatever it does; more than once is fine."""
        self._close()

    @classmethod
    def from_ready(cls, made: ReadyModel, post: Callable[[Message], object]) -> ModelHandle:
        """What a job has opened; `post` gets the messages of `watching` when it is loaded again."""
        from localq.chat.open_model import load_now  # whoever has opened it has imported these
        from localq.tui.jobs.thread_messages import PostingWatcher
        from localq.worker.messages import Profile

        opened, watcher = made.opened, PostingWatcher(post)
        client = opened.client

        def close() -> None:
            made.close()
            client.close()  # another process than the first, where one was loaded again

        return cls(
            opened.session,
            lambda: load_now(opened, watcher),
            close,
            lambda: client.profile(Profile(keep=True)),
        )

    @classmethod
    def for_session(cls, session: ChatSession) -> ModelHandle:
        """A session that somebody else has opened and closes."""

        def profile() -> dict[str, Any]:
            raise LocalqError("the decode step", "this engine takes no profile of it")

        return cls(session, session.ensure_loaded, lambda: None, profile)
