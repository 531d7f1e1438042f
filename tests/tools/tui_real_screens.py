"""Pictures of the full screen with a real model and what this machine has: no card is pretended, no figure made up.

    python -m tests.tools.tui_real_screens FOLDER --model MODEL [--device cuda] [--vram 2] [--sizes 130x40,80x24]

One run of the app for each size: an empty chat, a reply that streams, a conversation with its profile, the instruments,
the strip, lists, settings, help and palette. Writes FOLDER/SCREEN-SIZE.svg, and a PNG beside it where `rsvg-convert` is
installed. Settings and conversations lie in a folder that is removed afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from localq.chat import open_conversation
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.chat.chat_layout import WIDE
from tests.support.cli.terminal_localq import environment
from tests.support.tui.tui_pilot import screen_text, until
from tests.tools.tui_screens import QUESTION, SIZES, Stage, to_png

SECOND = "And how do I sort the lines by price if they do not fit into memory?"
FIRST = "Explain in three short paragraphs how a lighthouse works."


async def shoot(folder: Path, settings: Settings, size: tuple[int, int]) -> list[Path]:
    """All screens at `size`, columns and rows. Returns the pictures."""
    app, made = LocalqApp(settings, open_conversation.start(None, settings, None, print)), list[Path]()
    name = "x".join(map(str, size))

    def keep(screen: str) -> None:
        path = folder / f"{screen}-{name}.svg"
        path.write_text(app.export_screenshot(title="localq", simplify=True) + "\n", "utf-8")
        made.append(path)

    async with app.run_test(size=size) as pilot:
        stage = Stage(app, pilot, lambda: None)
        await until(pilot, lambda: app.model is not None or app.error is not None)
        if app.error is not None:
            raise app.error
        await stage.until(lambda: not app.chat.conversation.busy)
        keep("empty")
        await stage.say(FIRST)
        await stage.press("ctrl+n")
        await stage.say(QUESTION)
        await stage.profile()
        keep("chat")
        await stage.say(SECOND, waits=False)
        await until(pilot, lambda: app.chat.conversation.busy or SECOND[:20] in screen_text(app))
        await pilot.pause(0.1)  # a GPU answers 1,000 tokens a second, which push the question off the screen
        keep("answering")
        await stage.until(lambda: not app.chat.conversation.busy)
        if size[0] < WIDE:
            await stage.press("f2")
            keep("strip")
            await stage.press("f2")
        keep("instruments")
        await stage.press("f2")
        for screen, keys, back in (
            ("conversations", ("ctrl+b",), ("ctrl+b",)),
            ("completions", ("/",), ("backspace",)),
            ("settings", ("f4",), ("escape",)),
            ("help", ("f1",), ("escape",)),
            ("palette", ("ctrl+p",), ("escape",)),
        ):
            await stage.press(*keys)
            await pilot.pause(1.0)
            keep(screen)
            await stage.press(*back)
        app.exit(0)
    app.close()
    app = LocalqApp(settings, pick=True)
    async with app.run_test(size=size) as pilot:
        stage = Stage(app, pilot, lambda: None)
        await stage.planned()
        await pilot.pause(1.0)
        await stage.press("down", "down")
        keep("models")
        await stage.press("i")
        await pilot.pause(1.0)
        keep("details")
        app.exit(0)
    app.close()
    return made


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--vram", help="GPU memory to use at most, as for `localq chat`")
    parser.add_argument("--tokens", type=int, default=400, help="of a reply, at most")
    parser.add_argument("--sizes", default=",".join(f"{width}x{height}" for width, height in SIZES))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for size in given.sizes.split(","):
        columns, rows = map(int, size.split("x"))
        with tempfile.TemporaryDirectory() as home:
            os.environ.update({**environment(Path(home)), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
            settings = Settings(
                model=given.model, device=given.device, vram=given.vram, max_tokens=given.tokens, temperature=0.0,
                offline=True,
            )  # fmt: skip
            for path in asyncio.run(shoot(given.folder, settings, (columns, rows))):
                to_png(path)
                print(path, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
