"""The conversation of `--continue` and `--resume`: the last, a named one, or one chosen from a list."""

from __future__ import annotations

import sys

from localq.chat.history.record import Record
from localq.chat.history.store import ConversationStore
from localq.cli.output import ask, note, stderr
from localq.errors import usage_error


def find_conversation(last: bool, name: str | None) -> Record | None:
    """The conversation that `--continue` or `--resume` selects; None if neither is given.

    Raises LocalqError (exit 2) where there is none.
    """
    if not last and name is None:
        return None
    if last and name is not None:
        raise usage_error("--continue", "cannot be combined with --resume", "Use one or the other.")
    store = ConversationStore()
    return store.find(_choose(store) if name == "" else name)


def _choose(store: ConversationStore) -> str:
    from localq.chat.commands.sessions import SHOWN, table  # start-up cost: it imports all chat commands

    found = store.summaries(limit=SHOWN)
    if not found:
        raise usage_error("--resume", "no saved conversations", "Start one with `localq chat`.")
    if not (sys.stdin.isatty() and stderr().isatty()):
        raise usage_error("--resume", "cannot show a picker without a terminal", "Pass a conversation number or title.")
    note(table(found))
    ask("Resume which conversation? ")
    answer = sys.stdin.readline().strip()
    if not answer:
        raise usage_error("--resume", "no conversation chosen", "Pass a conversation number or title.")
    return answer
