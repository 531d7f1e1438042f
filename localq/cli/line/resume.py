"""The conversation that `--continue` and `--resume` mean: the last, one that is named, or one chosen from a list."""

from __future__ import annotations

import sys

from localq.chat.history.record import Session
from localq.chat.history.store import SessionStore
from localq.cli.output import note
from localq.errors import usage_error


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


def _asked(store: SessionStore) -> str:
    from localq.chat.commands.sessions import SHOWN, table  # start-up cost: all commands of a chat come along

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
