"""Key bindings of the full screen: their names in `[keys]` of config.toml, default keys and actions.

A new key is a line in `KEYS`, its name in the `BINDINGS` of the screen or widget, and a method `action_NAME` there; a
name that begins with its place drops it (`picker_open` runs `action_open`).
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

    label   short text for the line of keys of a screen; without one it is not shown there
    """

    keys: str
    where: str
    what: str
    label: str = ""


ANYWHERE, MESSAGE, CONVERSATION, SIDEBAR = "anywhere", "prompt", "conversation", "sidebar"
PICKER, QUESTION, DETAILS, OPENING = "picker", "question", "details", "opening"
SETTINGS, INSTRUMENTS = "settings", "instruments"

KEYS: dict[str, Key] = {
    "help": Key("f1", ANYWHERE, "help: keys and commands", "help"),
    "palette": Key("ctrl+p", ANYWHERE, "search all actions by name", "actions"),
    "stop": Key(
        "escape,ctrl+c", ANYWHERE, "stop the reply but keep its text; press twice at an empty prompt to quit", "stop"
    ),
    "quit": Key("ctrl+q", ANYWHERE, "quit"),
    "new": Key("ctrl+n", ANYWHERE, "new conversation"),
    "models": Key("f3", ANYWHERE, "choose another model", "models"),
    "settings": Key("f4", ANYWHERE, "settings", "settings"),
    "sessions": Key("ctrl+s", ANYWHERE, "search conversations"),
    "sidebar": Key("ctrl+b", ANYWHERE, "show or hide the list of conversations", "conversations"),
    "instruments": Key("f2", ANYWHERE, "show or hide the instruments: speed, memory, kernel times", "instruments"),
    "profile": Key("f5", ANYWHERE, "time the kernels in one decode step"),
    "thinking": Key("ctrl+t", ANYWHERE, "show or hide thinking"),
    "copy": Key("ctrl+y", ANYWHERE, "copy the last reply"),
    "jump": Key("ctrl+o", ANYWHERE, "switch between prompt and conversation"),
    "send": Key("enter", MESSAGE, "send", "send"),
    "newline": Key("shift+enter,alt+enter,ctrl+j", MESSAGE, "new line", "new line"),
    "editor": Key("ctrl+g", MESSAGE, "edit in $VISUAL or $EDITOR"),
    "complete": Key("tab", MESSAGE, "complete a /command or an @file"),
    "older": Key("up", MESSAGE, "previous message (when on the first line)"),
    "newer": Key("down", MESSAGE, "next message (when on the last line)"),
    "leave": Key("ctrl+d", MESSAGE, "quit (at an empty prompt)"),
    "turn_before": Key("up", CONVERSATION, "previous turn", "turns"),
    "turn_after": Key("down", CONVERSATION, "next turn, then the prompt"),
    "line_up": Key("k", CONVERSATION, "scroll up one line"),
    "line_down": Key("j", CONVERSATION, "scroll down one line"),
    "page_up": Key("pageup", CONVERSATION, "scroll up one page (also works in the prompt)"),
    "page_down": Key("pagedown", CONVERSATION, "scroll down one page (also works in the prompt)"),
    "first": Key("g,home", CONVERSATION, "first turn"),
    "last": Key("G,end", CONVERSATION, "last turn"),
    "edit": Key("e", CONVERSATION, "edit and resend the message", "edit"),
    "regenerate": Key("r", CONVERSATION, "regenerate the reply", "regenerate"),
    "copy_turn": Key("y", CONVERSATION, "copy this turn or code block, unformatted", "copy"),
    "branch_before": Key("left_square_bracket", CONVERSATION, "previous version of this turn", "versions"),
    "branch_after": Key("right_square_bracket", CONVERSATION, "next version of this turn"),
    "write": Key("i", CONVERSATION, "back to the prompt", "prompt"),
    "sidebar_new": Key("n", SIDEBAR, "new conversation", "new"),
    "sidebar_rename": Key("r", SIDEBAR, "rename", "rename"),
    "sidebar_delete": Key("d", SIDEBAR, "delete", "delete"),
    "sidebar_undo": Key("u", SIDEBAR, "undo the last delete", "undo"),
    "sidebar_search": Key("slash", SIDEBAR, "go to the search field", "search"),
    "sidebar_list": Key("down", SIDEBAR, "move from the search field to the list"),
    "sidebar_back": Key("escape", SIDEBAR, "cancel a rename or search; otherwise the same as `stop`", "close"),
    "picker_open": Key("enter", PICKER, "open the model", "open"),
    "picker_force": Key("f", PICKER, "open a model that does not fit (asks first)", "force"),
    "picker_pull": Key("p", PICKER, "download without opening", "download"),
    "picker_delete": Key("d", PICKER, "delete from disk (asks first)", "delete"),
    "picker_details": Key("i", PICKER, "show details, as `localq show` does", "details"),
    "picker_sort": Key("s", PICKER, "change the sort order", "sort"),
    "picker_every": Key("a", PICKER, "show all formats, or one line per family", "all models"),
    "picker_filter": Key("slash", PICKER, "go to the filter", "filter"),
    "picker_list": Key("down", PICKER, "go from the filter to the list", "list"),
    "picker_leave": Key("escape", PICKER, "clear the filter; press again to go back", "back"),
    "question_yes": Key("y", QUESTION, "yes", "yes"),
    "question_no": Key("escape,n", QUESTION, "no", "no"),
    "question_other": Key("b", QUESTION, "use the built-in model instead of downloading one", "built-in"),
    "question_session": Key("s", QUESTION, "allow a tool for this session", "this session"),
    "question_never": Key("v", QUESTION, "never allow a tool in this session", "never"),
    "question_stop": Key("ctrl+c", QUESTION, "stop the reply instead of calling the tool"),
    "details_leave": Key("escape,q,i", DETAILS, "back", "back"),
    "opening_leave": Key("escape", OPENING, "stop loading; press again (or after an error) to go back", "stop"),
    "opening_again": Key("r", OPENING, "retry after an error", "retry"),
    "settings_apply": Key("ctrl+s", SETTINGS, "apply and go back", "apply"),
    "settings_keep": Key("f6", SETTINGS, "apply and save to config.toml", "save"),
    "settings_leave": Key("escape", SETTINGS, "discard changes and go back", "back"),
    "instruments_profile": Key("k", INSTRUMENTS, "time the kernels in one decode step", "time the kernels"),
    "instruments_leave": Key("escape,q", INSTRUMENTS, "back to the conversation", "back"),
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
            near = difflib.get_close_matches(name[:80], KEYS, n=3) or list(KEYS)
            raise usage_error(f"keys.{name[:80]}", "unknown action", f"Did you mean {' or '.join(near)}?")
        if not isinstance(keys, str) or not all(_KEY.fullmatch(each.strip()) for each in keys.split(",")):
            raise usage_error(
                f"keys.{name}", f"{keys!r:.80} is not a list of keys", 'Use keys such as "ctrl+x" or "f5,alt+h".'
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
                    why = f"{each} is already bound to {other}"
                    raise usage_error(f"keys.{name}", why, f"Change keys.{other} or keys.{name}.")
