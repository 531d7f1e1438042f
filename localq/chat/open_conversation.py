"""Where a chat begins and where it is kept: a conversation that it goes on with, its settings, and the store."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localq.chat import stop_strings
from localq.chat.history import snapshot_keeper
from localq.chat.history.store import ConversationStore
from localq.errors import ExitCode, LocalqError
from localq.settings import Settings

if TYPE_CHECKING:  # start-up cost
    from localq.chat.history.record import Record
    from localq.chat.history.snapshot_keeper import SnapshotKeeper
    from localq.chat.session import ChatSession
    from localq.text.grammar import Grammar


@dataclass(frozen=True)
class Start:
    """Where a chat begins: a conversation that it goes on with, where it saves (None = nowhere), its stop strings.

    keeper   of what the model has read, None = nobody
    grammar  that answers keep to
    """

    record: Record | None = None
    store: ConversationStore | None = None
    stop: tuple[str, ...] = ()
    keeper: SnapshotKeeper | None = None
    grammar: Grammar | None = None

    @property
    def search_store(self) -> ConversationStore:
        """Where conversations to go on with are: also for a chat that is not kept."""
        return self.store or ConversationStore()

    def attach(self, session: ChatSession) -> Record | None:
        """Give `session`, which was just opened, what it starts with; returns the conversation gone on with."""
        session.store, session.stop_strings, session.keeper = self.store, self.stop, self.keeper
        session.grammar = self.grammar
        if self.record is not None:
            self.record.model, self.record.conversation.system = session.record.model, session.system
            session.record = self.record
        return self.record


def start(
    record: Record | None,
    settings: Settings,
    stop: list[str] | None,
    say: Callable[[str], None],
    grammar: Grammar | None = None,
) -> Start:
    """Where the chat begins. `stop`, `grammar`: as asked for now, else as saved. Raises as `saving`, and exit 2."""
    saved = record.settings if record is not None else None
    kept, kept_grammar = (saved.stop, saved.grammar) if saved is not None else ((), None)
    store = open_store(settings, say)
    keeper = None if store is None else snapshot_keeper.keeper(store.path, settings)
    return Start(record, store, kept if stop is None else stop_strings.validate(stop), keeper, grammar or kept_grammar)


def open_store(settings: Settings, say: Callable[[str], None]) -> ConversationStore | None:
    """Where conversations are saved; None where they are not.

    Raises LocalqError (exit 8) where the file is damaged or of a newer version. A disk that cannot be written is told,
    and tried again with every turn.
    """
    if not settings.save:
        return None
    store = ConversationStore()
    try:
        store.check()
    except LocalqError as error:
        if error.exit_code == ExitCode.BAD_FILE:
            raise
        say(f"this conversation is not saved so far: {error}")
    return store


def resumed_settings(record: Record, settings: Settings, flags: dict[str, Any]) -> Settings:
    """`settings` with what was saved with the conversation laid over it, and `flags` over that.

    With another model than before, that one's own sampling holds.
    """
    saved: dict[str, Any] = {"system": record.conversation.system, "model": record.model or settings.model}
    if flags.get("model") in (None, record.model) and record.settings is not None:
        chosen = record.settings
        saved |= dataclasses.asdict(chosen.sampling) | {"max_tokens": chosen.max_tokens, "think": chosen.think}
    return dataclasses.replace(settings, **saved).replace(**flags)


def save_at_exit(session: ChatSession, say: Callable[[str], None]) -> bool:
    """Try once more to save what could not be saved; where that fails, say so."""
    try:
        session.save_unsaved()
    except LocalqError as error:
        with contextlib.suppress(OSError):  # the terminal may be gone
            say(f"localq: the end of this conversation is not saved: {error}")
    return not session.unsaved
