"""Keys of `localq.keymap` as Textual bindings, and as labels."""

from __future__ import annotations

from typing import Any

from textual.binding import Binding
from textual.screen import Screen

from localq.keymap import KEYS, Key

_SHOWN = {
    "left_square_bracket": "[", "right_square_bracket": "]", "pageup": "PageUp", "pagedown": "PageDown",
    "escape": "Esc", "question_mark": "?", "slash": "/",
}  # fmt: skip


def bindings(*names: str, priority: bool = False, of: str = "") -> list[Binding]:
    """Bindings with these names: `name` runs `action_name`; a name that begins with its place drops it
    (`picker_open` runs `action_open`).

    priority: before the focused widget. of: "screen." for an action of the screen.
    """
    return [_binding(name, KEYS[name], priority, of) for name in names]


def _binding(name: str, key: Key, priority: bool, of: str) -> Binding:
    action = of + name.removeprefix(f"{key.where}_")
    return Binding(key.keys, action, key.label or key.what, show=bool(key.label), priority=priority, id=name)


def active_key(screen: Screen[Any], name: str) -> str:
    """Label of the first key of `name`, as configured and bound on `screen`."""
    active = (key for key, each in screen.active_bindings.items() if each.binding.id == name)
    return _one(next(active, KEYS[name].keys.split(",")[0]))


def first_key(key: Key) -> str:
    """Label of the first key: "Ctrl-X" for "ctrl+x,f2"."""
    return _one(key.keys.split(",")[0])


def key_labels(key: Key) -> str:
    """Labels of all keys: "Ctrl-X, F2" for "ctrl+x,f2"."""
    return ", ".join(_one(each) for each in key.keys.split(","))


def _one(key: str) -> str:
    *modifiers, name = key.split("+")
    name = _SHOWN.get(name, name if len(name) == 1 and not modifiers else name.capitalize())
    return "-".join([*(each.capitalize() for each in modifiers), name])
