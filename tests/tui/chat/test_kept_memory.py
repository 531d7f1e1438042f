"""What the full screen keeps of turns that are gone: nothing of how they were drawn."""

from __future__ import annotations

import gc

from textual._styles_cache import StylesCache

from tests.support.tui.tui_pilot import chat_app, drive_chat, say

TURNS = 6


def test_lines_of_replies_that_are_gone_are_freed():
    app, kept = chat_app(*[["Hello, and *so* on.\n\n- one\n- two\n"]] * TURNS), []

    async def script(pilot):
        for number in range(TURNS):
            await say(pilot, f"say {number}")
            await say(pilot, "/new")
            gc.collect()
            kept.append(sum(isinstance(each, StylesCache) for each in gc.get_objects()))

    drive_chat(app, script)
    assert kept[-1] == kept[1], kept
