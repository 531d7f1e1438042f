"""Entries of the command palette: key actions of the current screen, slash commands, themes."""

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
    """Entries for `screen`: its key actions, then, in a chat, the slash commands."""
    yield from _of_keys(app, screen)
    yield SystemCommand("Theme", "choose a theme", app.action_change_theme)
    if isinstance(screen, ChatScreen):
        for name, (usage, what) in completion.command_usages().items():
            escaped = usage.replace("[", "\\[")  # Textual reads it as markup
            yield SystemCommand(f"{name}: {what}", escaped, partial(screen.take_command, name, usage == name))


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
    """The action, with the key's name if that is another word, so that a search finds it."""
    word = name.rpartition("_")[2]
    return f"{what[:1].upper()}{what[1:]}{'' if word in what else f' ({word})'}"
