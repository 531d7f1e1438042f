"""Lines of a saved conversation in the list: title, time, turns, model; plain text, no markup."""

from __future__ import annotations

from pathlib import Path

from localq.chat.history.record import RecordSummary
from localq.sanitize import sanitize
from localq.wording import local_time


def prompt(each: RecordSummary, current: int | None, now_s: float) -> str:
    """Two lines; the current conversation has ">" before its title."""
    mark = ">" if each.id == current else " "
    turns = "1 turn" if each.turns == 1 else f"{each.turns} turns"
    model = Path(each.model).name  # for a folder its name is enough
    return f"{mark} {one_line(each.title)}\n  {when(each.changed_s, now_s)}, {turns}, {one_line(model)}"


def when(changed_s: float, now_s: float) -> str:
    """ "now", "5 min ago", "3 h ago", "yesterday" or a date; a date too for a time in the future."""
    minutes = (now_s - changed_s) / 60
    if 0 <= minutes < 24 * 60:
        return "now" if minutes < 1 else f"{minutes:.0f} min ago" if minutes < 60 else f"{minutes / 60:.0f} h ago"
    day = local_time(changed_s, "%F")
    return "yesterday" if day == local_time(now_s - 86400, "%F") else day


def one_line(text: str) -> str:
    """`text` sanitized, on one line."""
    return " ".join(sanitize(text).split())
