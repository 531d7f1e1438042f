"""`ModelHandle`: an open model as screens use it: session, loading, profiling, closing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from textual.message import Message

from localq.errors import LocalqError

if TYPE_CHECKING:  # start-up cost
    from localq.chat.session import ChatSession
    from localq.tui.jobs.model_jobs import ReadyModel


class ModelHandle:
    """An open model. `load`, `profile` and `close` block; call them in threads."""

    def __init__(
        self,
        session: ChatSession,
        load: Callable[[], object],
        close: Callable[[], object],
        profile: Callable[[], dict[str, Any]],
    ) -> None:
        self.session, self._load, self._close, self._profile = session, load, close, profile

    def load(self) -> None:
        """Load the model unless the engine process has it loaded. Raises LocalqError."""
        self._load()

    def profile(self) -> dict[str, Any]:
        """Profile of a decode step after the conversation: `StepProfile.to_dict()`. Raises LocalqError."""
        return self._profile()

    def close(self) -> None:
        """End the engine process within 2 s; may be called again."""
        self._close()

    @classmethod
    def from_ready(cls, made: ReadyModel, post: Callable[[Message], object]) -> ModelHandle:
        """A handle of an opened model; `post` gets the messages of later loads."""
        from localq.chat.open_model import load_now  # imported already by opening the model
        from localq.tui.jobs.thread_messages import PostingWatcher
        from localq.worker.messages import Profile

        opened, watcher = made.opened, PostingWatcher(post)
        client = opened.client

        def close() -> None:
            made.close()
            client.close()  # after a reload this is another process

        return cls(
            opened.session,
            lambda: load_now(opened, watcher),
            close,
            lambda: client.profile(Profile(keep=True)),
        )

    @classmethod
    def for_session(cls, session: ChatSession) -> ModelHandle:
        """A handle of a session that the caller opened and closes."""

        def profile() -> dict[str, Any]:
            raise LocalqError("profile", "this engine cannot profile the decode step")

        return cls(session, session.ensure_loaded, lambda: None, profile)
