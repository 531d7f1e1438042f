"""The keys of the TUI: what each is called in `[keys]` of config.toml, which keys it has at first, and what it does.

Pure data, without Textual, so that the settings can refuse what does not exist. A key is named as Textual names it:
"ctrl+x", "f2", "shift+enter"; several are separated by commas.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from localq.errors import usage_error


@dataclass(frozen=True)
class Key:
    """The keys that something has, where they act ("anywhere", "message", "conversation"), and what they do."""

    keys: str
    where: str
    what: str


ANYWHERE, MESSAGE, CONVERSATION = "anywhere", "message", "conversation"

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
}  # fmt: skip
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
    _refuse_clashes(found)
    return found


def in_force(chosen: Mapping[str, str]) -> dict[str, Key]:
    """`KEYS` with those that were chosen."""
    return {name: Key(chosen.get(name, key.keys), key.where, key.what) for name, key in KEYS.items()}


def _refuse_clashes(chosen: Mapping[str, str]) -> None:
    taken: dict[tuple[str, str], str] = {}
    for name, key in in_force(chosen).items():
        places = (MESSAGE, CONVERSATION) if key.where == ANYWHERE else (key.where,)
        for each in key.keys.split(","):
            for place in places:
                other = taken.setdefault((place, each), name)
                if other != name and {other, name} & set(chosen):
                    why = f"{each} is the key of {other} too"
                    raise usage_error(f"keys.{name}", why, f"Give one of them another: keys.{other}, keys.{name}.")
