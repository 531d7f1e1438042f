"""What the palette lists: what keys do on the screen that it is called from, the commands of a chat, the themes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from textual.app import SystemCommand
from textual.screen import Screen

from localq import keymap
from localq.chat.commands import completion
from localq.tui.chat.chat_screen import ChatScreen
from localq.tui.jobs.chat_app import ChatApp
from localq.tui.keys import key_labels


def system_commands(app: ChatApp, screen: Screen[Any]) -> Iterator[SystemCommand]:
    """Of `screen`; what has no key there is not listed."""
    yield from _of_keys(app, screen)
    yield SystemCommand("Theme", "choose another", app.action_change_theme)
    if isinstance(screen, ChatScreen):
        for name, (usage, what) in completion.command_usages().items():
            told = usage.replace("[", "\\[")  # Textual reads it as markup
            yield SystemCommand(f"{name}: {what}", told, partial(screen.take_command, name, usage == name))


def _of_keys(app: ChatApp, screen: Screen[Any]) -> Iterator[SystemCommand]:
    known = keymap.bindings(app.settings.keys)
    bound = {each.binding.id for each in screen.active_bindings.values()}
    places = {known[name].where for name in bound if name in known}
    elsewhere = () if isinstance(screen, ChatScreen) else ("models", "settings")  # they open from the conversation
    for name, key in known.items():
        action = f"action_{name.removeprefix(f'{key.where}_')}"
        nodes = (app, screen) if key.where == keymap.ANYWHERE else (screen,) if key.where in places else ()
        node = next((each for each in nodes if hasattr(each, action)), None)
        if node is not None and name not in ("palette", "stop", *elsewhere):
            yield SystemCommand(_title(name, key.what), key_labels(key), getattr(node, action))


def _title(name: str, what: str) -> str:
    """With the name of the key, which may be the word that is looked for."""
    word = name.rpartition("_")[2]
    return f"{what[:1].upper()}{what[1:]}{'' if word in what else f' ({word})'}"
