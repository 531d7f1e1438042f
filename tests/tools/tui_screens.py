"""Pictures of every screen at four sizes, with a pretended RTX 3090 of 24 GB and a scripted engine.

    python -m tests.tools.tui_tour --screens FOLDER [--sizes 80x24,160x50] [--only chat,settings]

Writes FOLDER/SCREEN-SIZE.svg, and FOLDER/SCREEN-SIZE.png where `rsvg-convert` is installed. Nothing is measured here:
figures on the pictures are made up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from textual.pilot import Pilot

from localq.errors import LocalqError
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.jobs import model_jobs
from localq.tui.jobs.thread_messages import Fetching, LoadingStage, StoppedError
from localq.tui.models.picker import PickerScreen
from localq.tui.models.picker_table import ModelTable
from tests.support.tui.pretended_card import HOST_ONLY, chat_app, pretended, talks
from tests.support.tui.tui_pilot import screen_text, until

SIZES = ((80, 24), (120, 40), (160, 50), (200, 60))
FIRA_CODE_EM = 1200 / 1950  # width of a character, in the size of the font
QUESTION = "How do I read a large CSV file in Python without loading all of it? Please show code and say what it costs."
ANSWER = """Read it **row by row**: an iterator holds one row at a time, so memory stays constant whatever the size of \
the file.

1. `csv.DictReader` gives each row as a dictionary
2. `polars.scan_csv` plans the whole query and reads only the columns it needs

```python
import csv
from collections.abc import Iterator


def rows(path: str) -> Iterator[dict[str, str]]:
    \"\"\"Each row of the file at `path`.\"\"\"
    with open(path, newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


total = sum(float(row["price"]) for row in rows("sales.csv"))
```

| way | memory | rows/s |
| --- | --- | --- |
| `csv.DictReader` | constant | 1 million |
| `polars.scan_csv` | a few MB per thread | 40 million |

> For a single pass the first is enough; for several, convert the file to Parquet once.
"""
THOUGHT = "<think>The user wants to read a large file. An iterator is enough, I show csv first and then a faster way."
SECOND = "And if I need the lines sorted by price?"
LONG = "Sort in chunks that fit into memory, write each to disk, and merge them with `heapq.merge`. " * 12


@dataclass
class Stage:
    """What a scene has: the app, its pilot, and `keep`, which takes the picture."""

    app: LocalqApp
    pilot: Pilot[Any]
    keep: Callable[[], None]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for it, and until all is drawn."""
        await until(self.pilot, condition)
        await self.still()

    async def still(self) -> None:
        """Wait until nothing is drawn any more: the instruments draw 8 times a second."""
        await self.pilot.pause(0.35)

    async def say(self, text: str, waits: bool = True) -> None:
        """Send a message; waits: until the reply is drawn."""
        self.app.chat.composer.put(text)
        self.app.set_focus(self.app.chat.composer)
        await self.pilot.press("enter")
        await self.pilot.pause(0.05)
        if waits:
            await self.until(lambda: not self.app.chat.conversation.busy)

    async def profile(self) -> None:
        """Time a decode step."""
        self.app.chat.instruments.action_profile()
        await self.still()
        await self.until(lambda: not self.app.chat.conversation.busy)

    async def planned(self) -> None:
        """Wait for the plans of the list of models."""
        picker = self.app.screen
        await self.until(lambda: isinstance(picker, PickerScreen) and picker.query_one(ModelTable).rows_shown)
        await self.until(lambda: "..." not in picker._rows[0].verdict)  # type: ignore[attr-defined]

    async def press(self, *keys: str) -> None:
        """Press keys, and wait until nothing is drawn any more."""
        await self.pilot.press(*keys)
        await self.still()


Scene = Callable[[Stage], Awaitable[None]]

# ---- scenes


async def chat(stage: Stage) -> None:
    """Two questions with their replies."""
    await stage.say(QUESTION)
    await stage.profile()
    await stage.say(SECOND)
    stage.keep()


async def empty(stage: Stage) -> None:
    """Before the first message."""
    await stage.until(lambda: stage.app.chat.conversation.model is not None)
    stage.keep()


async def sending(stage: Stage) -> None:
    """A message is sent, its prompt is being read."""
    await stage.say(QUESTION)
    await stage.say(SECOND, waits=False)
    await stage.still()
    stage.keep()


async def answering(stage: Stage) -> None:
    """A reply streams."""
    await stage.say(QUESTION)
    await stage.say(SECOND, waits=False)
    await stage.pilot.pause(1.0)
    stage.keep()


async def thinking(stage: Stage) -> None:
    """The model thinks."""
    await stage.say(QUESTION, waits=False)
    await stage.pilot.pause(1.0)
    stage.keep()


async def thought(stage: Stage) -> None:
    """A reply with its thought unfolded."""
    await stage.say(QUESTION)
    await stage.press("ctrl+t")
    stage.keep()


async def failed(stage: Stage) -> None:
    """A reply that failed, and notices."""
    await stage.say("/set max_tokens 12")
    await stage.say(QUESTION)
    await stage.still()
    stage.keep()


async def instruments(stage: Stage) -> None:
    """The whole panel of instruments: below 120 columns it is a screen of its own."""
    await stage.say(QUESTION)
    await stage.profile()
    await stage.say(SECOND)
    if stage.app.size.width < 120:
        await stage.press("f2")
        await stage.press("f2")
    stage.keep()


async def strip(stage: Stage) -> None:
    """The instruments in their shortest form, while a reply streams."""
    await stage.say(QUESTION)
    if stage.app.size.width < 120:
        await stage.press("f2")
    await stage.say(SECOND, waits=False)
    await stage.pilot.pause(1.0)
    stage.keep()


async def conversations(stage: Stage) -> None:
    """The list of conversations."""
    await stage.say(QUESTION)
    await stage.press("ctrl+b")
    await stage.until(lambda: "Lisbon" in screen_text(stage.app))
    stage.keep()


async def completions(stage: Stage) -> None:
    """Commands that begin with a slash."""
    await stage.say(QUESTION)
    await stage.press("/")
    stage.keep()


async def settings(stage: Stage) -> None:
    """The settings."""
    await stage.say(QUESTION)
    await stage.press("f4")
    stage.keep()


async def palette(stage: Stage) -> None:
    """The command palette."""
    await stage.say(QUESTION)
    await stage.press("ctrl+p")
    await stage.pilot.pause(0.6)
    stage.keep()


async def palette_search(stage: Stage) -> None:
    """The command palette while it is searched."""
    await stage.say(QUESTION)
    await stage.press("ctrl+p")
    await stage.press(*"model")
    await stage.pilot.pause(0.6)
    stage.keep()


async def help_page(stage: Stage) -> None:
    """The help."""
    await stage.say(QUESTION)
    await stage.press("f1")
    stage.keep()


async def models(stage: Stage) -> None:
    """The list of models."""
    await stage.planned()
    await stage.pilot.pause(1.0)
    await stage.press("down", "down")
    stage.keep()


async def models_all(stage: Stage) -> None:
    """The list of models with every format, filtered."""
    await stage.planned()
    await stage.press(*"qwen3")
    await stage.press("down", "a")
    await stage.pilot.pause(2.0)
    stage.keep()


async def details(stage: Stage) -> None:
    """The details of a model."""
    await stage.planned()
    await stage.press("down", "i")
    await stage.pilot.pause(1.0)
    stage.keep()


async def question(stage: Stage) -> None:
    """A question before something is opened that does not fit."""
    await stage.planned()
    await stage.press(*"large")
    await stage.press("down", "f")
    stage.keep()


async def opening(stage: Stage) -> None:
    """A model is being fetched for a chat."""
    await stage.planned()
    await stage.press("down", "enter")
    await stage.pilot.pause(1.5)
    stage.keep()


async def loading(stage: Stage) -> None:
    """A model is being loaded behind an empty chat."""
    await stage.until(lambda: "35%" in screen_text(stage.app))
    stage.keep()


# ---- who plays


def _pending() -> threading.Event:
    event = threading.Event()
    _PENDING.append(event)
    return event


_PENDING: list[threading.Event] = []
CHATS: dict[str, tuple[Scene, Callable[[Path], LocalqApp]]] = {
    "empty": (empty, lambda home: chat_app()),
    "chat": (chat, lambda home: chat_app([ANSWER], [LONG])),
    "sending": (sending, lambda home: chat_app([ANSWER], [_pending(), LONG])),
    "answering": (answering, lambda home: chat_app([ANSWER], [LONG, _pending(), "."])),
    "thinking": (thinking, lambda home: chat_app([THOUGHT, _pending(), "</think>Yes."])),
    "thought": (thought, lambda home: chat_app([THOUGHT, "</think>" + ANSWER])),
    "failed": (failed, lambda home: chat_app([ANSWER[:90], LocalqError("engine process",
        "stopped unexpectedly (signal SIGKILL)", "The next message starts a new one.")])),
    "instruments": (instruments, lambda home: chat_app([ANSWER], [LONG])),
    "strip": (strip, lambda home: chat_app([ANSWER], [LONG, _pending(), "."])),
    "cpu": (instruments, lambda home: chat_app([ANSWER], [LONG], loaded=HOST_ONLY)),
    "conversations": (conversations, lambda home: chat_app([ANSWER], store=talks(home))),
    "completions": (completions, lambda home: chat_app([ANSWER])),
    "settings": (settings, lambda home: chat_app([ANSWER])),
    "palette": (palette, lambda home: chat_app([ANSWER])),
    "palette-search": (palette_search, lambda home: chat_app([ANSWER])),
    "help": (help_page, lambda home: chat_app([ANSWER])),
    "chat-no-colour": (chat, lambda home: chat_app([ANSWER], [LONG])),
}  # fmt: skip
PICKERS: dict[str, Scene] = {
    "models": models, "models-all": models_all, "details": details, "question": question, "opening": opening
}  # fmt: skip
SCREENS = (*CHATS, "loading", *PICKERS)


def _load_slowly(name: str, settings: Settings, wanted: object, watcher: Any) -> None:
    """A load that gets to 35 % and stays there."""
    watcher._post(LoadingStage("loading weights", 6_100_000_000, 17_400_000_000))
    while not watcher.stopped:
        time.sleep(0.05)
    raise StoppedError(name)


def _fetch_slowly(name: str, settings: Settings, wanted: object, watcher: Any) -> None:
    """A fetch that goes on for long."""
    for step in range(10_000):
        done = 6_100_000_000 + step * 2_400_000
        watcher._post(Fetching("model-00002-of-00004.safetensors", done, 19_400_000_000, 5_000_000_000))
        time.sleep(0.02)
        if watcher.stopped:
            break
    raise StoppedError(name)


async def shoot(name: str, size: tuple[int, int], path: Path, home: Path) -> None:
    """Play a scene and write its picture."""
    scene, app = _cast(name, home)

    def keep() -> None:
        path.write_text(app.export_screenshot(title="localq", simplify=True) + "\n", "utf-8")

    async with app.run_test(size=size) as pilot:
        if name in CHATS:
            await until(pilot, lambda: app.chat.is_mounted and app.chat.conversation.model is not None)
        await scene(Stage(app, pilot, keep))
        for each in _PENDING:
            each.set()
        _PENDING.clear()
        app.exit(0)


def _cast(name: str, home: Path) -> tuple[Scene, LocalqApp]:
    if name in CHATS:
        scene, make = CHATS[name]
        return scene, make(home)
    if name == "loading":
        return loading, LocalqApp(Settings(model="qwen3-32b"))
    return PICKERS[name], LocalqApp(Settings(), pick=True)


def screens(folder: Path, sizes: tuple[tuple[int, int], ...], names: tuple[str, ...]) -> None:
    """Pictures of `names` at `sizes`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        for columns, rows in sizes:
            path = folder / f"{name}-{columns}x{rows}.svg"
            with tempfile.TemporaryDirectory() as home, pretended(Path(home)), contextlib.ExitStack() as more:
                work = _fetch_slowly if name == "opening" else _load_slowly if name == "loading" else None
                if work is not None:
                    more.enter_context(mock.patch.object(model_jobs, "open_and_load", work))
                if name.endswith("no-colour"):
                    more.enter_context(mock.patch.dict(os.environ, {"NO_COLOR": "1"}))
                asyncio.run(shoot(name, (columns, rows), path, Path(home)))
            to_png(path)
            print(path, flush=True)


def to_png(path: Path) -> None:
    """The picture as PNG beside it, where `rsvg-convert` is installed; that one knows neither `textLength` nor the
    width of a cell, so the font (Fira Code) is made to fit."""
    convert = shutil.which("rsvg-convert")
    if convert is None:
        return
    text = path.read_text("utf-8").replace("<svg ", '<svg xml:space="preserve" ', 1)
    text = text.replace("font-size: 20px", f"font-size: {12.2 / FIRA_CODE_EM:.3f}px")
    command = [convert, "-o", str(path.with_suffix(".png"))]
    subprocess.run(command, input=text.encode(), check=True)
