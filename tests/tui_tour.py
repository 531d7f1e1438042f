"""The full screen as a new user meets it, from the first start to a conversation that is gone on with, under tmux.

    python -m pytest tests/tui_tour.py                    at 80x24 and 160x50, with the embedded model on the CPU
    python tests/tui_tour.py --screenshots tests/data/screenshots    SVGs of what README shows, without tmux

At each step what the pane shows is looked at: texts that must be there, lines that must not be longer than the window,
the composer and the line of what goes on at the bottom, whole.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from real_model import smollm2  # noqa: E402
from terminal_localq import environment  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
WAIT_S = 40.0
STORY = "Tell me a long story about a ship."


class Pane:
    """One tmux session with a server of its own; `text` is what it shows, after the end too."""

    def __init__(self, home: Path, size: tuple[int, int], *command: str) -> None:
        self.size, self.socket, self.home = size, str(home / "tmux.socket"), home
        values = {**environment(home, TERM="screen-256color"), "LOCALQ_DEVICE": "cpu"}
        given = ("LOCALQ_", "HF_", "XDG_", "HOME", "PYTHONPATH")
        line = ["env", *(f"{name}={value}" for name, value in values.items() if name.startswith(given)), *command]
        where = ("new-session", "-d", "-x", str(size[0]), "-y", str(size[1]))
        self.tmux(*where, *line, ";", "set", "-g", "remain-on-exit", "on")

    def tmux(self, *arguments: str) -> str:
        command = ["tmux", "-S", self.socket, "-f", "/dev/null", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20, cwd=ROOT).stdout

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        self.tmux("send-keys", "-l", text)

    @property
    def text(self) -> str:
        return self.tmux("capture-pane", "-p")

    def until(self, *wanted: str, but: str = "\0") -> str:
        """The pane once all of that is seen, and not the other."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            shown = self.text
            if all(each in shown for each in wanted) and but not in shown:
                return shown
            time.sleep(0.05)
        raise AssertionError(f"not seen: {wanted} without {but!r}, but\n{self.text}")

    def answered(self, question: str) -> None:
        """Until what follows the question is a reply, and nothing goes on or is drawn any more."""
        shown, before, end = "", None, time.monotonic() + WAIT_S
        while shown != before or "Reply" not in shown.rpartition(question)[2] or not self.is_ready(shown):
            assert time.monotonic() < end, f"no reply to {question!r}, but\n{shown}"
            time.sleep(0.3)
            before, shown = shown, self.text

    @staticmethod
    def is_ready(shown: str) -> bool:
        """By the line at the bottom."""
        return shown.rstrip().rpartition("\n")[2].strip().startswith("ready")

    def whole(self) -> str:
        """Nothing is cut: no line is wider than the window, the bottom is where it belongs."""
        lines = self.text.rstrip("\n").split("\n")
        assert len(lines) <= self.size[1]
        assert all(len(line) <= self.size[0] for line in lines)
        assert lines[-1].strip().startswith(("ready", "answering", "reading", "thinking")), lines[-1]
        assert lines[-2].strip("─ ") == "", lines[-2]  # the frame of the message, not something over it
        return "\n".join(lines)

    def close(self) -> None:
        subprocess.run(["tmux", "-S", self.socket, "kill-server"], capture_output=True, check=False, timeout=20)


@pytest.fixture
def home(tmp_path):
    smollm2()  # skips by name where it is not installed
    return tmp_path


@pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=["80x24", "160x50"])
def test_the_first_hour(home, size):
    localq = (sys.executable, "-m", "localq")
    pane = Pane(home, size, *localq)
    try:
        choose(pane)
        converse(pane)
        other_conversation(pane)
        leave(pane)
    finally:
        pane.close()
    pane = Pane(home, size, *localq, "chat", "--continue")
    try:
        pane.until("ready", "two and two")  # the last one that something was said in
        pane.whole()
        say(pane, "Say hi.")
        pane.answered("Say hi.")
        leave(pane)
    finally:
        pane.close()


def choose(pane: Pane) -> None:
    """The list of models; the embedded one is found by its name."""
    pane.until("smollm2-135m")
    pane.type("smollm2-135m")
    pane.until("smollm2-135m", but="llama")
    pane.keys("Enter")
    pane.until("ready", "smollm2-135m")
    pane.whole()


def say(pane: Pane, text: str) -> None:
    pane.type(text)
    pane.keys("Enter")


def converse(pane: Pane) -> None:
    """Ask, interrupt, answer again, say it otherwise."""
    say(pane, STORY)
    pane.until("answering", "tok/s")
    pane.keys("Escape")
    pane.until("stopped", "ready")
    pane.whole()
    say(pane, "/regen")
    pane.until("answering")
    pane.keys("Escape")
    pane.until("2 of 2", "ready")
    pane.whole()
    say(pane, "/edit Name one ship, in one word.")
    pane.answered("Name one ship")
    pane.whole()


def other_conversation(pane: Pane) -> None:
    """Another one, and back by the list at the side."""
    say(pane, "/set max_tokens 12")
    pane.until("max_tokens = 12")
    pane.answered("Name one ship")  # and the command is over
    pane.keys("C-n")
    pane.until("ready", but="Name one ship")
    say(pane, "What is two and two?")
    pane.answered("two and two")
    pane.whole()
    say(pane, "/resume Tell me")
    pane.until("Name one ship", "ready", but="two and two")
    pane.whole()


def leave(pane: Pane) -> None:
    pane.keys("C-q")
    pane.until("goes on")


# ---- screenshots


async def shoot(folder: Path) -> list[Path]:
    """SVGs of what README shows, by Textual's exporter: the list of models, a conversation, its instruments."""
    from textual.app import App

    from localq import resuming, settings
    from localq.tui.app import LocalqApp

    made: list[Path] = []

    async def until(app: App[int], pilot: object, holds: object) -> None:
        while not holds():  # type: ignore[operator]
            await pilot.pause(0.1)  # type: ignore[attr-defined]

    def keep(app: App[int], name: str) -> None:
        path = folder / f"{name}.svg"
        path.write_text(app.export_screenshot(title="localq", simplify=True) + "\n", "utf-8")
        made.append(path)

    chosen = settings.load()
    app = LocalqApp(chosen, resuming.start(None, chosen, None, print), pick=True)
    async with app.run_test(size=(110, 30)) as pilot:
        await until(app, pilot, lambda: "smollm2" in app.export_screenshot())
        await pilot.pause(1.0)
        keep(app, "models")
    app = LocalqApp(chosen, resuming.start(None, chosen, None, print))
    async with app.run_test(size=(130, 36)) as pilot:
        await until(app, pilot, lambda: app.model is not None and not app.chat.conversation.busy)
        app.chat.composer.put("Write a short Python function that adds two numbers.")
        await pilot.press("enter")
        await until(app, pilot, lambda: app.chat.conversation.busy)
        await until(app, pilot, lambda: not app.chat.conversation.busy)
        await pilot.pause(0.5)
        keep(app, "instruments")
        await pilot.press("f2", "ctrl+b")
        await pilot.pause(1.5)
        keep(app, "conversations")
    app.close()
    return made


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--screenshots", type=Path, required=True)
    folder = parser.parse_args().screenshots
    folder.mkdir(parents=True, exist_ok=True)
    smollm2()
    with tempfile.TemporaryDirectory() as home:
        os.environ.update({**environment(Path(home)), "LOCALQ_MODEL": "smollm2-135m", "LOCALQ_MAX_TOKENS": "200"})
        for path in asyncio.run(shoot(folder)):
            print(path, path.stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
