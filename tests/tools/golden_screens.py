"""A few screens, text for text, as they are kept in tests/data/screens: `python -m tests.tools.golden_screens`.

That writes them anew, for a change of what is seen that was meant; `git diff tests/data/screens` shows it. What stands
on them depends on no clock, machine or version: replies are scripted, what models and machines can do is made up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from textual.pilot import Pilot

from localq.files.local_models import LocalModel
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.dialogs.help_screen import HelpScreen
from localq.tui.models import picker_plans, picker_rows
from localq.tui.models.picker_plans import Outlook
from localq.tui.models.picker_rows import FITS, NOT_YET, ON_CPU, SHORT, TOO_LARGE, PickerRow
from tests.support.tui.tui_pilot import chat_app, drive, drive_chat, say, screen_text, until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "screens"
REPLY = (
    "Two ways to add **two numbers**:\n\n1. with a function\n2. with `sum`\n\n"
    "```python\ndef add(a, b):\n    return a + b\n```\n\n> Both give the same.\n"
)
OUTLOOK = Outlook("NVIDIA GeForce RTX 3090: 23,000 MiB available", 23_000 * 2**20, basis="by 850 GB/s, measured")
HERE = LocalModel("smollm2-135m", "gguf", Path("smollm2-135m.gguf"), 98_400_000, "embedded", True, 0.0)
PART = LocalModel("qwen3-32b", "nf4", Path("qwen3-32b"), 4_200_000_000, "hub", False, 0.0)
ROWS = [
    PickerRow("smollm2-135m", "gguf", FITS, ctx=8192, tok_s=648.4, tok_s_full=512.0, local=HERE),
    PickerRow("qwen3-32b", "nf4", FITS, ctx=15_360, tok_s=38.25, tok_s_full=30.5, local=PART),
    PickerRow("llama-3.3-70b", "vq2", SHORT, "its weights leave room for 2,048 tokens", 2048, 9.96),
    PickerRow("phi-4", "bf16", TOO_LARGE, "its weights take 28,000 MiB"),
    PickerRow("gpt-oss-20b", "mxfp4", NOT_YET, "no version runs it"),
    PickerRow("an-organisation/with-a-long-name-of-a-model", "awq", ON_CPU, ctx=4096),
]


def chat() -> str:
    """A conversation with two versions of a reply, a block of code and the line of what goes on."""
    app = chat_app(["first"], [REPLY])

    async def script(pilot: Pilot[Any]) -> None:
        await say(pilot, "How do I add two numbers? Show me two ways, please, and say which of them is the better one.")
        await say(pilot, "/regen")
        await until(pilot, lambda: "Both give the same." in screen_text(app))
        shown.append(screen_text(app))

    shown: list[str] = []
    drive_chat(app, script)
    return shown[0]


def help_page() -> str:
    """The first lines of the help, over an empty conversation."""
    app = chat_app()

    async def script(pilot: Pilot[Any]) -> None:
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen) and "Anywhere" in screen_text(app))
        await pilot.pause()
        shown.append(screen_text(app))

    shown: list[str] = []
    drive_chat(app, script)
    return shown[0]


def picker() -> str:
    """Models with verdicts of every kind, in the columns that 80 cells have room for."""
    app = LocalqApp(Settings(), pick=True)

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "23,000 MiB" in screen_text(app))
        await pilot.press("down", "down", "down")
        await pilot.pause()
        shown.append(screen_text(app))

    shown: list[str] = []
    with (
        mock.patch.object(picker_rows, "name_rows", return_value=ROWS),
        mock.patch.object(picker_plans, "outlook", return_value=OUTLOOK),
        mock.patch.object(picker_plans, "plan_rows", return_value=ROWS),
    ):
        drive(app, script)
    return shown[0]


SCREENS: dict[str, Callable[[], str]] = {"chat": chat, "help": help_page, "picker": picker}


def kept(name: str) -> Path:
    """The file of a screen."""
    return FOLDER / f"{name}.txt"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, shown in SCREENS.items():
        kept(name).write_text(shown() + "\n", "utf-8")
        print(kept(name).relative_to(ROOT))
