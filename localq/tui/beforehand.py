"""What the first frame does without and the first keys may want: imported when that frame is there, one module after
the other on the app's own loop, so that a key waits for one of them at most, and no two threads for each other."""

from __future__ import annotations

import asyncio
import gc
import importlib

# The parts of a reply, then what a slash, a command and the keys of `keymap.ANYWHERE` show.
MODULES = (
    "markdown_it", "pygments.lexers", "localq.tui.reply_text", "localq.chat", "localq.commands.completing",
    "localq.tui.themes", "localq.tui.help_screen", "localq.tui.sessions_panel", "localq.tui.settings_screen",
    "localq.tui.picker", "localq.tui.picker_dialogs", "localq.tui.opening_screen",
)  # fmt: skip


async def imported() -> None:
    """Import them."""
    for name in MODULES:
        importlib.import_module(name)
        await asyncio.sleep(0)  # keys first


def garbage() -> None:
    """Look for garbage, which nobody did before the first frame (`cli.tui`), but never among what is here, which stays:
    that would take 0.1 s in the middle of typing."""
    gc.freeze()
    gc.enable()
