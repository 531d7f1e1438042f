"""The keys of the TUI: what each is called in `[keys]` of config.toml, which keys it has at first, and what it does.

Pure data, without Textual, so that the settings can refuse what does not exist. A key is named as Textual names it:
"ctrl+x", "f2", "shift+enter"; several are separated by commas.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from localq.errors import usage_error


@dataclass(frozen=True)
class Key:
    """The keys that something has, where they act (one of the words below), and what they do.

    label   the same for the line at the foot of a screen; without one it is not shown there
    """

    keys: str
    where: str
    what: str
    label: str = ""


ANYWHERE, MESSAGE, CONVERSATION, SIDEBAR = "anywhere", "message", "conversation", "sidebar"
PICKER, QUESTION, DETAILS, OPENING = "picker", "question", "details", "opening"
SETTINGS, INSTRUMENTS = "settings", "instruments"

KEYS: dict[str, Key] = {
    "help": Key("f1", ANYWHERE, "help: keys and commands"),
    "palette": Key("ctrl+p", ANYWHERE, "everything that can be done, by name"),
    "stop": Key("escape,ctrl+c", ANYWHERE, "stop the reply and keep it; twice at an empty message: leave"),
    "quit": Key("ctrl+q", ANYWHERE, "leave"),
    "new": Key("ctrl+n", ANYWHERE, "another conversation"),
    "models": Key("f3", ANYWHERE, "another model"),
    "settings": Key("f4", ANYWHERE, "settings"),
    "sessions": Key("ctrl+s", ANYWHERE, "look for a conversation"),
    "sidebar": Key("ctrl+b", ANYWHERE, "show or hide the list of conversations"),
    "instruments": Key("f2", ANYWHERE, "show or hide speed, memory and kernel times"),
    "profile": Key("f5", ANYWHERE, "time a step of the model for the instruments"),
    "thinking": Key("ctrl+t", ANYWHERE, "show or hide what was thought"),
    "copy": Key("ctrl+y", ANYWHERE, "copy the last reply"),
    "jump": Key("ctrl+o", ANYWHERE, "between the message and the conversation"),
    "send": Key("enter", MESSAGE, "send"),
    "newline": Key("shift+enter,alt+enter,ctrl+j", MESSAGE, "a new line"),
    "editor": Key("ctrl+g", MESSAGE, "write it in $VISUAL or $EDITOR"),
    "complete": Key("tab", MESSAGE, "complete a /command or the @name of a file"),
    "older": Key("up", MESSAGE, "at its first line: the message before"),
    "newer": Key("down", MESSAGE, "at its last line: the message after"),
    "leave": Key("ctrl+d", MESSAGE, "leave, where nothing is written"),
    "turn_before": Key("up", CONVERSATION, "the turn before"),
    "turn_after": Key("down", CONVERSATION, "the turn after; behind the last one the message"),
    "line_up": Key("k", CONVERSATION, "a line up"),
    "line_down": Key("j", CONVERSATION, "a line down"),
    "page_up": Key("pageup", CONVERSATION, "a page up (in the message too)"),
    "page_down": Key("pagedown", CONVERSATION, "a page down (in the message too)"),
    "first": Key("g,home", CONVERSATION, "the beginning"),
    "last": Key("G,end", CONVERSATION, "the end"),
    "edit": Key("e", CONVERSATION, "say this message otherwise"),
    "regenerate": Key("r", CONVERSATION, "answer again"),
    "copy_turn": Key("y", CONVERSATION, "copy this turn, or this block of code, as it was written"),
    "branch_before": Key("left_square_bracket", CONVERSATION, "what was said here before"),
    "branch_after": Key("right_square_bracket", CONVERSATION, "what was said here after"),
    "write": Key("i", CONVERSATION, "back to the message"),
    "sidebar_new": Key("n", SIDEBAR, "another conversation"),
    "sidebar_rename": Key("r", SIDEBAR, "rename it"),
    "sidebar_delete": Key("d", SIDEBAR, "delete it"),
    "sidebar_undo": Key("u", SIDEBAR, "bring back what was deleted last"),
    "sidebar_search": Key("slash", SIDEBAR, "to the search"),
    "sidebar_list": Key("down", SIDEBAR, "from the search to the list"),
    "sidebar_back": Key("escape", SIDEBAR, "out of a title, out of a search; then as `stop`"),
    "picker_open": Key("enter", PICKER, "open it", "Open"),
    "picker_force": Key("f", PICKER, "open what the plan says does not fit, after a question", "Force"),
    "picker_pull": Key("p", PICKER, "fetch it, and open nothing", "Fetch"),
    "picker_delete": Key("d", PICKER, "remove it from the disk, after a question", "Delete"),
    "picker_details": Key("i", PICKER, "what `localq show` tells of it", "Details"),
    "picker_sort": Key("s", PICKER, "the next order", "Sort"),
    "picker_every": Key("a", PICKER, "every format, or the best of each model", "All formats"),
    "picker_filter": Key("slash", PICKER, "to the filter", "Filter"),
    "picker_list": Key("down", PICKER, "from the filter to the list", "To the list"),
    "picker_leave": Key("escape", PICKER, "empty the filter; then back", "Back"),
    "question_yes": Key("y", QUESTION, "yes"),
    "question_no": Key("escape,n", QUESTION, "no"),
    "details_leave": Key("escape,q,i", DETAILS, "back"),
    "opening_leave": Key("escape", OPENING, "stop; again, or after an error: back"),
    "opening_again": Key("r", OPENING, "after an error: try again"),
    "settings_apply": Key("ctrl+s", SETTINGS, "apply and go back"),
    "settings_keep": Key("f6", SETTINGS, "apply, and write it to config.toml"),
    "settings_leave": Key("escape", SETTINGS, "back, without what was not applied"),
    "instruments_profile": Key("k", INSTRUMENTS, "time a step of the model"),
    "instruments_leave": Key("escape,q", INSTRUMENTS, "back to the conversation"),
}  # fmt: skip
EVERY_SCREEN = ("help", "palette", "quit", "models", "settings")  # the others of ANYWHERE are those of the conversation
_CHAT = (MESSAGE, CONVERSATION, SIDEBAR)
_SHARED = {"stop", "sidebar_back"}  # what the one has no use for is the other's
_KEY = re.compile(r"((ctrl|alt|shift|super|meta|hyper)\+)*\w+")


def checked(chosen: Mapping[str, object]) -> dict[str, str]:
    """`[keys]` of config.toml. Raises LocalqError (exit 2) for a name that is none, naming those near it, for a value
    that names no keys, and for a key that would do two things."""
    found: dict[str, str] = {}
    for name, keys in chosen.items():
        if name not in KEYS:
            near = difflib.get_close_matches(name, KEYS, n=3) or list(KEYS)
            raise usage_error(f"keys.{name}", "there is no such key", f"Did you mean {', '.join(near)}?")
        if not isinstance(keys, str) or not all(_KEY.fullmatch(each.strip()) for each in keys.split(",")):
            raise usage_error(f"keys.{name}", f"{keys!r} names no keys", 'Use something like "ctrl+x" or "f5,alt+h".')
        found[name] = ",".join(each.strip() for each in keys.split(","))
    if found:  # those of `KEYS` clash with none; and every model of the catalogue has settings that are checked
        _refuse_clashes(found)
    return found


def in_force(chosen: Mapping[str, str]) -> dict[str, Key]:
    """`KEYS` with those that were chosen."""
    return {name: replace(key, keys=chosen.get(name, key.keys)) for name, key in KEYS.items()}


def _places(name: str, where: str) -> tuple[str, ...]:
    """Where a key of this name is looked at: other screens than its own have nothing to do with it."""
    if name in EVERY_SCREEN:
        return (*_CHAT, PICKER, QUESTION, DETAILS, OPENING, SETTINGS, INSTRUMENTS)
    if name in ("instruments", "profile"):
        return (*_CHAT, INSTRUMENTS)
    return _CHAT if where == ANYWHERE or name in ("page_up", "page_down") else (where,)


def _refuse_clashes(chosen: Mapping[str, str]) -> None:
    taken: dict[tuple[str, str], str] = {}
    for name, key in in_force(chosen).items():
        for each in key.keys.split(","):
            for place in _places(name, key.where):
                other = taken.setdefault((place, each), name)
                if other != name and {other, name} & set(chosen) and {other, name} != _SHARED:
                    why = f"{each} is the key of {other} too"
                    raise usage_error(f"keys.{name}", why, f"Give one of them another: keys.{other}, keys.{name}.")
