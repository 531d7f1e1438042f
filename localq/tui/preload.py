"""What the first frame does without and the first keys may want: imported when that frame is there, one module after
the other on the app's own loop, so that a key waits for one of them at most, and no two threads for each other."""

from __future__ import annotations

import asyncio
import gc
import importlib

# The parts of a reply, then what a slash, a command and the keys of `keymap.ANYWHERE` show.
MODULES = (
    "markdown_it", "pygments.lexers", "localq.tui.reply.reply_text", "localq.chat.session",
    "localq.chat.commands.completion", "localq.tui.dialogs.themes", "localq.tui.dialogs.help_screen",
    "localq.tui.chat.sessions_panel", "localq.tui.dialogs.settings_screen", "localq.tui.models.picker",
    "localq.tui.models.picker_dialogs", "localq.tui.models.opening_screen", "localq.tui.dialogs.palette_lines",
)  # fmt: skip
SELDOM = 200  # times the middle generation is looked through, before everything is: by default, 10


async def import_modules() -> None:
    """Import them."""
    for name in MODULES:
        importlib.import_module(name)
        await asyncio.sleep(0)  # keys first


def tune_garbage_collection() -> None:
    """Look for garbage, which nobody did before the first frame (`cli.tui`), but never among what is here, which stays:
    that would take 0.1 s in the middle of typing. Looking through all that has come since takes 0.03 s and more, and
    is for when a reply has ended (`tidied`)."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(*gc.get_threshold()[:2], SELDOM)


def collect_garbage() -> None:
    """Look through everything now, since nothing streams."""
    if gc.isenabled() and gc.get_threshold()[2] == SELDOM:  # `garbage` has been called: not in a test's process
        gc.collect()
