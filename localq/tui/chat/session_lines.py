"""Lines of a saved conversation in the list: title, time, turns, model; and the days that group them."""

from __future__ import annotations

from pathlib import Path

from textual.content import Content

from localq.chat.history.record import RecordSummary
from localq.sanitize import sanitize
from localq.tui.gauge import MUTED
from localq.wording import local_time

DAY_S = 86400.0
WEEKDAYS = 6  # days before today that are named by their weekday


def prompt(each: RecordSummary, current: int | None, now_s: float) -> Content:
    """Two lines; the current conversation has ">" before its title."""
    is_current = each.id == current
    turns = "1 turn" if each.turns == 1 else f"{each.turns} turns"
    model = Path(each.model).name  # for a folder its name is enough
    title = f"{'>' if is_current else ' '} {one_line(each.title)}", "bold" if is_current else ""
    return Content.assemble(title, (f"\n  {when(each.changed_s, now_s)}, {turns}, {one_line(model)}", MUTED))


def unsaved_prompt(why: str) -> Content:
    """The open conversation where it is not saved: that, and below it why."""
    return Content.assemble(("> This chat is not saved", "bold"), *(("\n  " + line, MUTED) for line in why.split("\n")))


def day(changed_s: float, now_s: float) -> str:
    """ "Today", "Yesterday", a weekday of the last days, else the month: "October 2026"."""
    back = _days_back(changed_s, now_s)
    if back is None:
        return local_time(changed_s, "%B %Y")
    return ("Today", "Yesterday")[back] if back < 2 else local_time(changed_s, "%A")


def heading(name: str) -> Content:
    """The line above the conversations of a day."""
    return Content.styled(name, "bold $text-accent")


def when(changed_s: float, now_s: float) -> str:
    """ "now", "5 min ago", the time of day in the last days, else a date; a date too for a time in the future."""
    minutes = (now_s - changed_s) / 60
    if 0 <= minutes < 60:
        return "now" if minutes < 1 else f"{minutes:.0f} min ago"
    named = minutes >= 0 and _days_back(changed_s, now_s) is not None  # the line above names the day
    return local_time(changed_s, "%H:%M" if named else "%F")


def _days_back(changed_s: float, now_s: float) -> int | None:
    """Calendar days before today; None for a day without a name of its own."""
    names = {local_time(now_s - back * DAY_S, "%F"): back for back in reversed(range(WEEKDAYS + 1))}
    return names.get(local_time(changed_s, "%F"))


def one_line(text: str) -> str:
    """`text` sanitized, on one line."""
    return " ".join(sanitize(text).split())
