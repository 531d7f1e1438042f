"""Modules imported after the first frame, one per turn of the event loop: a key waits for one at most."""

from __future__ import annotations

import asyncio
import gc
import importlib

from rich import cells
from textual._styles_cache import StylesCache

# For a reply, then for a slash, a command, and the screens of `keymap.ANYWHERE`.
MODULES = (
    "markdown_it", "pygments.lexers", "localq.tui.reply.reply_text", "localq.chat.session",
    "localq.chat.commands.completion", "localq.tui.dialogs.themes", "localq.tui.dialogs.help_screen",
    "localq.tui.chat.sessions_panel", "localq.tui.dialogs.settings_screen", "localq.tui.models.picker",
    "localq.tui.models.picker_dialogs", "localq.tui.models.opening_screen", "localq.tui.dialogs.palette_lines",
)  # fmt: skip
SELDOM = 200  # collections of the middle generation before a full one; Python's default is 10


async def import_modules() -> None:
    """Import `MODULES`."""
    for name in MODULES:
        importlib.import_module(name)
        await asyncio.sleep(0)  # let keys be handled


def tune_garbage_collection() -> None:
    """Turn on garbage collection, which is off until the first frame (`cli.verbs.tui`), without the objects so far.

    Scanning those takes 0.1 s in the middle of typing. A full collection of newer ones takes 0.03 s and more, and runs
    after a reply (`collect_garbage`).
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(*gc.get_threshold()[:2], SELDOM)


def collect_garbage() -> None:
    """Run a full collection, between replies.

    Textual's cache of colours holds the lines of 1,024 widgets that are gone, 17 kB each: its keys are their caches.
    Rich's cache of widths holds 4,096 pieces of text, 0.7 kB a reply until it is full.
    """
    StylesCache.get_inner_outer.cache_clear()
    cells.cached_cell_len.cache_clear()
    if gc.isenabled() and gc.get_threshold()[2] == SELDOM:  # only after `tune_garbage_collection`, so not in tests
        gc.collect()
