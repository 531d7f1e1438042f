"""Entries of the command palette: key actions of the current screen, slash commands, themes.

What has a key and a command is one entry, with both beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.cells import cell_len
from textual.content import Content
from textual.screen import Screen

from localq import keymap
from localq.chat.commands import completion
from localq.tui.chat.chat_screen import ChatScreen
from localq.tui.gauge import MUTED
from localq.tui.jobs.chat_app import ChatApp
from localq.tui.key_line import KEY_STYLE
from localq.tui.keys import first_key

# Keys and commands that do the same
SAME = {
    "help": "/help", "new": "/new", "copy": "/copy", "quit": "/exit", "edit": "/edit", "regenerate": "/regen",
}  # fmt: skip
_LEAST_TITLE = 20  # cells of a title before its command is left out


@dataclass(frozen=True)
class PaletteEntry:
    """A line of the palette: title, command with its arguments, key ("" for none), and what it runs."""

    title: str
    usage: str
    key: str
    run: Callable[[], Any]

    @property
    def text(self) -> str:
        """Text that a search looks at."""
        return " ".join(filter(None, (self.title, self.usage, self.key)))

    def line(self, width: int, title: Content | None = None) -> Content:
        """One line of `width` cells: the title, command and key at the right. title: with its matches marked."""
        beside = [(self.usage, MUTED), (f"{self.key:>9}", KEY_STYLE)]
        room = width - sum(cell_len(text) + 2 for text, _ in beside)
        if room < _LEAST_TITLE:
            beside, room = beside[1:], width - cell_len(beside[1][0]) - 2
        shown = (title or Content(self.title)).truncate(max(1, room), ellipsis=True)
        right = Content("  ").join(Content.styled(*each) for each in beside if each[0])
        return Content.assemble(shown, " " * max(1, width - shown.cell_length - right.cell_length), right)


def entries(app: ChatApp, screen: Screen[Any]) -> list[PaletteEntry]:
    """Entries for `screen`: its key actions, the themes, then, in a chat, the other slash commands."""
    usages = completion.command_usages() if isinstance(screen, ChatScreen) else {}
    of_keys = list(_of_keys(app, screen, usages))
    theme = PaletteEntry("Theme: choose one", "", "", app.action_change_theme)
    return [*of_keys, theme, *_of_commands(screen, usages, {each.usage.partition(" ")[0] for each in of_keys})]


def _of_keys(app: ChatApp, screen: Screen[Any], usages: Mapping[str, tuple[str, str]]) -> Iterator[PaletteEntry]:
    known = keymap.bindings(app.settings.keys)
    bound = {each.binding.id for each in screen.active_bindings.values()}
    places = {known[name].where for name in bound if name in known}
    elsewhere = () if isinstance(screen, ChatScreen) else ("models", "settings")  # they open from the conversation
    for name, key in known.items():
        action = f"action_{name.removeprefix(f'{key.where}_')}"
        nodes = (app, screen) if key.where == keymap.ANYWHERE else (screen,) if key.where in places else ()
        node = next((each for each in nodes if hasattr(each, action)), None)
        if node is not None and name not in ("palette", "stop", *elsewhere):
            usage = usages.get(SAME.get(name, ""), ("", ""))[0]
            yield PaletteEntry(_title(name, key.what), usage, first_key(key), getattr(node, action))


def _of_commands(screen: Screen[Any], usages: Mapping[str, tuple[str, str]], taken: set[str]) -> Iterator[PaletteEntry]:
    if not isinstance(screen, ChatScreen):
        return
    by_title: dict[str, list[tuple[str, str]]] = {}  # commands of one description are one entry
    for name, (usage, what) in usages.items():
        if name not in taken:
            by_title.setdefault(f"{what[:1].upper()}{what[1:]}", []).append((name, usage))
    for title, found in by_title.items():
        name, usage = found[0]
        beside = ", ".join(usage for _, usage in found)
        yield PaletteEntry(title, beside, "", partial(screen.take_command, name, usage == name))


def _title(name: str, what: str) -> str:
    """The action, with the key's name if that is another word, so that a search finds it."""
    word = name.rpartition("_")[2]
    return f"{what[:1].upper()}{what[1:]}{'' if word in what.lower() else f' ({word})'}"
