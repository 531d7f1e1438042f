"""The keys of `localq.keymap` as Textual's bindings, and as people read them."""

from __future__ import annotations

from textual.binding import Binding

from localq.keymap import KEYS, Key

_SHOWN = {
    "left_square_bracket": "[", "right_square_bracket": "]", "pageup": "PageUp", "pagedown": "PageDown",
    "escape": "Esc", "question_mark": "?",
}  # fmt: skip


def bindings(*names: str, priority: bool = False) -> list[Binding]:
    """Bindings of these names: `name` runs `action_name` where it is bound. priority: before the widget in focus."""
    return [Binding(KEYS[name].keys, name, KEYS[name].what, show=False, priority=priority, id=name) for name in names]


def shown(key: Key) -> str:
    """ "Ctrl-X, F2" for "ctrl+x,f2"."""
    return ", ".join(_one(each) for each in key.keys.split(","))


def _one(key: str) -> str:
    *modifiers, name = key.split("+")
    name = _SHOWN.get(name, name if len(name) == 1 and not modifiers else name.capitalize())
    return "-".join([*(each.capitalize() for each in modifiers), name])
