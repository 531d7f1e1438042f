"""A saved conversation as lines of a list: what it is called, when it was last used. Titles are data, never markup."""

from __future__ import annotations

from pathlib import Path

from localq.chat.history.record import RecordSummary
from localq.sanitize import sanitize
from localq.wording import local_time


def prompt(each: RecordSummary, current: int | None, now_s: float) -> str:
    """Two lines; ">" before the title of the conversation that is shown."""
    mark = ">" if each.id == current else " "
    turns = "1 turn" if each.turns == 1 else f"{each.turns} turns"
    model = Path(each.model).name  # of a model that is a folder, its name is enough here
    return f"{mark} {one_line(each.title)}\n  {when(each.changed_s, now_s)}, {turns}, {one_line(model)}"


def when(changed_s: float, now_s: float) -> str:
    """ "now", "5 min ago", "3 h ago", "yesterday", "2025-01-31"; a clock that was set back gives the date."""
    minutes = (now_s - changed_s) / 60
    if 0 <= minutes < 24 * 60:
        return "now" if minutes < 1 else f"{minutes:.0f} min ago" if minutes < 60 else f"{minutes / 60:.0f} h ago"
    day = local_time(changed_s, "%F")
    return "yesterday" if day == local_time(now_s - 86400, "%F") else day


def one_line(text: str) -> str:
    """Without what would break or hide it."""
    return " ".join(sanitize(text).split())
