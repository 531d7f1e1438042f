"""Key bindings of the full screen: their names in `[keys]` of config.toml, default keys and actions.

A new key is a line in `KEYS`, its name in the `BINDINGS` of the screen or widget, and a method `action_NAME` there.
Data without Textual, so that settings can be checked. Keys have Textual's names: "ctrl+x", "f2", "shift+enter";
commas separate several.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from localq.errors import usage_error


@dataclass(frozen=True)
class Key:
    """A binding: its keys, where they act (one of the words below), and what they do.

    label   short text for the bottom line of a screen; without one it is not shown there
    """

    keys: str
    where: str
    what: str
    label: str = ""


ANYWHERE, MESSAGE, CONVERSATION, SIDEBAR = "anywhere", "prompt", "conversation", "sidebar"
PICKER, QUESTION, DETAILS, OPENING = "picker", "question", "details", "opening"
SETTINGS, INSTRUMENTS = "settings", "instruments"

KEYS: dict[str, Key] = {
    "help": Key("f1", ANYWHERE, "help: keys and commands"),
    "palette": Key("ctrl+p", ANYWHERE, "all actions, by name"),
    "stop": Key("escape,ctrl+c", ANYWHERE, "stop the reply (text is kept); twice on an empty prompt: quit"),
    "quit": Key("ctrl+q", ANYWHERE, "quit"),
    "new": Key("ctrl+n", ANYWHERE, "new conversation"),
    "models": Key("f3", ANYWHERE, "choose another model"),
    "settings": Key("f4", ANYWHERE, "settings"),
    "sessions": Key("ctrl+s", ANYWHERE, "search conversations"),
    "sidebar": Key("ctrl+b", ANYWHERE, "show or hide the list of conversations"),
    "instruments": Key("f2", ANYWHERE, "show or hide the instruments: speed, memory, kernel times"),
    "profile": Key("f5", ANYWHERE, "time the kernels of one decode step"),
    "thinking": Key("ctrl+t", ANYWHERE, "show or hide thinking"),
    "copy": Key("ctrl+y", ANYWHERE, "copy the last reply"),
    "jump": Key("ctrl+o", ANYWHERE, "switch between prompt and conversation"),
    "send": Key("enter", MESSAGE, "send"),
    "newline": Key("shift+enter,alt+enter,ctrl+j", MESSAGE, "new line"),
    "editor": Key("ctrl+g", MESSAGE, "edit in $VISUAL or $EDITOR"),
    "complete": Key("tab", MESSAGE, "complete a /command or an @file"),
    "older": Key("up", MESSAGE, "on the first line: previous message"),
    "newer": Key("down", MESSAGE, "on the last line: next message"),
    "leave": Key("ctrl+d", MESSAGE, "quit, on an empty prompt"),
    "turn_before": Key("up", CONVERSATION, "previous turn"),
    "turn_after": Key("down", CONVERSATION, "next turn, then the prompt"),
    "line_up": Key("k", CONVERSATION, "scroll up one line"),
    "line_down": Key("j", CONVERSATION, "scroll down one line"),
    "page_up": Key("pageup", CONVERSATION, "scroll up one page (also in the prompt)"),
    "page_down": Key("pagedown", CONVERSATION, "scroll down one page (also in the prompt)"),
    "first": Key("g,home", CONVERSATION, "first turn"),
    "last": Key("G,end", CONVERSATION, "last turn"),
    "edit": Key("e", CONVERSATION, "edit and resend"),
    "regenerate": Key("r", CONVERSATION, "regenerate the answer"),
    "copy_turn": Key("y", CONVERSATION, "copy this turn or code block, unformatted"),
    "branch_before": Key("left_square_bracket", CONVERSATION, "previous version of this turn"),
    "branch_after": Key("right_square_bracket", CONVERSATION, "next version of this turn"),
    "write": Key("i", CONVERSATION, "back to the prompt"),
    "sidebar_new": Key("n", SIDEBAR, "new conversation"),
    "sidebar_rename": Key("r", SIDEBAR, "rename"),
    "sidebar_delete": Key("d", SIDEBAR, "delete"),
    "sidebar_undo": Key("u", SIDEBAR, "undo the last delete"),
    "sidebar_search": Key("slash", SIDEBAR, "go to the search"),
    "sidebar_list": Key("down", SIDEBAR, "go from the search to the list"),
    "sidebar_back": Key("escape", SIDEBAR, "leave a title or a search; then as `stop`"),
    "picker_open": Key("enter", PICKER, "open the model", "Open"),
    "picker_force": Key("f", PICKER, "open a model that does not fit, after confirmation", "Force"),
    "picker_pull": Key("p", PICKER, "fetch only", "Fetch"),
    "picker_delete": Key("d", PICKER, "delete from disk, after confirmation", "Delete"),
    "picker_details": Key("i", PICKER, "details, as in `localq show`", "Details"),
    "picker_sort": Key("s", PICKER, "next sort order", "Sort"),
    "picker_every": Key("a", PICKER, "all formats, or the best of each model", "All formats"),
    "picker_filter": Key("slash", PICKER, "go to the filter", "Filter"),
    "picker_list": Key("down", PICKER, "go from the filter to the list", "To the list"),
    "picker_leave": Key("escape", PICKER, "clear the filter; then back", "Back"),
    "question_yes": Key("y", QUESTION, "yes"),
    "question_no": Key("escape,n", QUESTION, "no"),
    "details_leave": Key("escape,q,i", DETAILS, "back"),
    "opening_leave": Key("escape", OPENING, "stop; again or after an error: back"),
    "opening_again": Key("r", OPENING, "retry after an error"),
    "settings_apply": Key("ctrl+s", SETTINGS, "apply and go back"),
    "settings_keep": Key("f6", SETTINGS, "apply and save to config.toml"),
    "settings_leave": Key("escape", SETTINGS, "back, discarding changes"),
    "instruments_profile": Key("k", INSTRUMENTS, "time the kernels of one decode step"),
    "instruments_leave": Key("escape,q", INSTRUMENTS, "back to the conversation"),
}  # fmt: skip
EVERY_SCREEN = ("help", "palette", "quit", "models", "settings")  # other ANYWHERE keys act in the chat only
_CHAT = (MESSAGE, CONVERSATION, SIDEBAR)
_SHARED = {"stop", "sidebar_back"}  # both may have the same key: the second acts where the first does not apply
_KEY = re.compile(r"((ctrl|alt|shift|super|meta|hyper)\+)*\w+")


def parse(chosen: Mapping[str, object]) -> dict[str, str]:
    """The table `[keys]` of config.toml, checked.

    Raises LocalqError (exit 2) for an unknown name (with similar ones), an invalid key, and a key with two actions.
    """
    found: dict[str, str] = {}
    for name, keys in chosen.items():
        if name not in KEYS:
            near = difflib.get_close_matches(name, KEYS, n=3) or list(KEYS)
            raise usage_error(f"keys.{name}", "unknown key binding", f"Did you mean {', '.join(near)}?")
        if not isinstance(keys, str) or not all(_KEY.fullmatch(each.strip()) for each in keys.split(",")):
            raise usage_error(
                f"keys.{name}", f"{keys!r} is not a list of keys", 'Use keys such as "ctrl+x" or "f5,alt+h".'
            )
        found[name] = ",".join(each.strip() for each in keys.split(","))
    if found:  # the defaults have no clashes, and settings are checked often
        _refuse_clashes(found)
    return found


def bindings(chosen: Mapping[str, str]) -> dict[str, Key]:
    """`KEYS` with the chosen keys."""
    return {name: replace(key, keys=chosen.get(name, key.keys)) for name, key in KEYS.items()}


def _places(name: str, where: str) -> tuple[str, ...]:
    """Places where the key `name` acts."""
    if name in EVERY_SCREEN:
        return (*_CHAT, PICKER, QUESTION, DETAILS, OPENING, SETTINGS, INSTRUMENTS)
    if name in ("instruments", "profile"):
        return (*_CHAT, INSTRUMENTS)
    return _CHAT if where == ANYWHERE or name in ("page_up", "page_down") else (where,)


def _refuse_clashes(chosen: Mapping[str, str]) -> None:
    taken: dict[tuple[str, str], str] = {}
    for name, key in bindings(chosen).items():
        for each in key.keys.split(","):
            for place in _places(name, key.where):
                other = taken.setdefault((place, each), name)
                if other != name and {other, name} & set(chosen) and {other, name} != _SHARED:
                    why = f"{each} is already the key of {other}"
                    raise usage_error(f"keys.{name}", why, f"Change keys.{other} or keys.{name}.")
