"""What `localq chat` goes on with: the last conversation, one that is named, or one chosen from a list."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from localq import stops
from localq.chat import ChatSession
from localq.cli.output import note
from localq.cli.session_commands import SHOWN, table, taken_up
from localq.errors import ExitCode, LocalqError, usage_error
from localq.session_record import Session
from localq.sessions import SessionStore
from localq.settings import Settings


@dataclass(frozen=True)
class Start:
    """Where a chat begins: a conversation that it goes on with, where it saves (None = nowhere), its stop strings."""

    record: Session | None = None
    store: SessionStore | None = None
    stop: tuple[str, ...] = ()

    def take_up(self, session: ChatSession, quiet: bool) -> None:
        """Give `session`, which was just opened, what it starts with; unless `quiet`, say how that ended."""
        session.store, session.stop_strings = self.store, self.stop
        if self.record is not None:
            self.record.model, self.record.conversation.system = session.record.model, session.system
            session.record = self.record
            if not quiet:
                note(taken_up(self.record))


def wanted_session(last: bool, wanted: str | None) -> Session | None:
    """The conversation that `--continue` or `--resume` means; None where neither was given.

    Raises LocalqError (exit 2) where there is none.
    """
    if not last and wanted is None:
        return None
    if last and wanted is not None:
        raise usage_error("--continue", "--resume was given too", "Give one of them.")
    store = SessionStore()
    return store.find(_asked(store) if wanted == "" else wanted)


def start(record: Session | None, settings: Settings, stop: list[str] | None) -> Start:
    """Where the chat begins. `stop`: of the command line, before what was saved. Raises as `saving`, and exit 2."""
    kept = record.settings.stop if record is not None and record.settings is not None else ()
    return Start(record, saving(settings), kept if stop is None else stops.checked(stop))


def saving(settings: Settings) -> SessionStore | None:
    """Where conversations are saved; None where they are not.

    Raises LocalqError (exit 8) where the file is damaged or of a newer version. A disk that cannot be written is told,
    and tried again with every turn.
    """
    if not settings.save:
        return None
    store = SessionStore()
    try:
        store.check()
    except LocalqError as error:
        if error.exit_code == ExitCode.BAD_FILE:
            raise
        note(f"this conversation is not saved so far: {error}")
    return store


def settings_of(record: Session, settings: Settings, flags: dict[str, Any]) -> Settings:
    """`settings` with what was saved with the conversation laid over it, and `flags` over that.

    With another model than before, that one's own sampling holds.
    """
    saved: dict[str, Any] = {"system": record.conversation.system, "model": record.model or settings.model}
    if flags.get("model") in (None, record.model) and record.settings is not None:
        saved |= dataclasses.asdict(record.settings.sampling) | {"max_tokens": record.settings.max_tokens}
    return dataclasses.replace(settings, **saved).replace(**flags)


def _asked(store: SessionStore) -> str:
    found = store.summaries(limit=SHOWN)
    if not found:
        raise usage_error("--resume", "no conversation was saved yet", "`localq chat` begins one.")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise usage_error("--resume", "there is no terminal to ask at", "Give the number or the title.")
    note(table(found))
    print("Go on with which one? ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip()
    if not answer:
        raise usage_error("--resume", "none was chosen", "Give the number or the title.")
    return answer
