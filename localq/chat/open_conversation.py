"""Start of a chat: a new or resumed conversation, its settings, and the store that saves it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localq.chat import stop_strings
from localq.chat.history import snapshot_keeper
from localq.chat.history.store import ConversationStore
from localq.errors import ExitCode, LocalqError
from localq.settings import Origin, Settings

if TYPE_CHECKING:  # start-up cost
    from localq.chat.history.record import Record
    from localq.chat.history.snapshot_keeper import SnapshotKeeper
    from localq.chat.session import ChatSession
    from localq.chat.tools.toolbox import Toolbox
    from localq.text.grammar import Grammar


@dataclass(frozen=True)
class Start:
    """Options for starting a chat.

    record   conversation to resume; None: a new one
    store    where it is saved; None: nowhere
    stop     stop strings
    keeper   saves and restores the KV cache; None: no snapshots
    grammar  constraint of the answers
    origins  settings that a project's file has decided
    unsaved  conversations of a session before this one that are still to be saved
    toolbox  MCP servers; None: none are named
    """

    record: Record | None = None
    store: ConversationStore | None = None
    stop: tuple[str, ...] = ()
    keeper: SnapshotKeeper | None = None
    grammar: Grammar | None = None
    origins: Mapping[str, Origin] = dataclasses.field(default_factory=dict)
    unsaved: tuple[Record, ...] = ()
    toolbox: Toolbox | None = None

    @property
    def search_store(self) -> ConversationStore:
        """The store of conversations that can be resumed, also for a chat that is not saved."""
        return self.store or ConversationStore()

    def attach(self, session: ChatSession) -> Record | None:
        """Apply to a session that was just opened; return the resumed conversation, if any."""
        session.store, session.stop_strings, session.keeper = self.store, self.stop, self.keeper
        session.grammar, session.origins, session.unsaved = self.grammar, dict(self.origins), list(self.unsaved)
        session.tools.toolbox = self.toolbox
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
    origins: Mapping[str, Origin] | None = None,
) -> Start:
    """Return the `Start`; `stop` and `grammar` override the saved ones. Raises as `open_store`, and exit 2."""
    saved = record.settings if record is not None else None
    kept, kept_grammar = (saved.stop, saved.grammar) if saved is not None else ((), None)
    store = open_store(settings, say)
    keeper = None if store is None else snapshot_keeper.keeper(store.path, settings)
    stops = kept if stop is None else stop_strings.validate(stop)
    return Start(record, store, stops, keeper, grammar or kept_grammar, origins or {})


def open_store(settings: Settings, say: Callable[[str], None]) -> ConversationStore | None:
    """The store of conversations; None with `--no-save`.

    Raises LocalqError (exit 8) where the file is damaged or of a newer version. A disk that cannot be written is a
    notice; saving is tried again with every turn.
    """
    if not settings.save:
        return None
    store = ConversationStore()
    try:
        store.check()
    except LocalqError as error:
        if error.exit_code == ExitCode.BAD_FILE:
            raise
        say(f"not saved yet: {error}")
    return store


def resumed_settings(record: Record, settings: Settings, flags: dict[str, Any]) -> Settings:
    """`settings`, overridden by those saved with the conversation, overridden by `flags`.

    With another model than before, the sampling is that model's default.
    """
    saved: dict[str, Any] = {"system": record.conversation.system, "model": record.model or settings.model}
    if flags.get("model") in (None, record.model) and record.settings is not None:
        chosen = record.settings
        saved |= dataclasses.asdict(chosen.sampling) | {"max_tokens": chosen.max_tokens, "think": chosen.think}
        saved |= {"loop_guard": chosen.loop_guard, "think_budget": chosen.think_budget}
        saved["preserve_thinking"] = chosen.preserve_thinking
    return dataclasses.replace(settings, **saved).replace(**flags)


def resumed_origins(record: Record, settings: Settings, project: Mapping[str, Origin]) -> dict[str, Origin]:
    """Settings in force that a project's file sets, here or in the saved conversation.

    settings   those of `resumed_settings`
    """
    found = [*project.items(), *record.origins().items()]
    return {name: each for name, each in found if getattr(settings, name) == each.value}


def without_model(origins: Mapping[str, Origin]) -> dict[str, Origin]:
    """`origins` after the user has chosen another model."""
    return {name: each for name, each in origins.items() if name != "model"}


def save_at_exit(session: ChatSession, say: Callable[[str], None]) -> LocalqError | None:
    """Save what could not be saved before; return why that fails, None where all is saved. `say` gets a failure."""
    try:
        session.save_unsaved()
    except LocalqError as error:
        with contextlib.suppress(OSError):  # the terminal may be gone
            say(f"localq: the last turns of this conversation were not saved: {error}")
        return error
    return None
