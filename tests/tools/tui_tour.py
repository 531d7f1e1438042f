"""The full screen as a new user meets it, from the first start to a conversation that is gone on with, under tmux.

    python -m pytest tests/tools/tui_tour.py                    at 80x24 and 160x50, with the embedded model on the CPU
    python -m tests.tools.tui_tour --pictures FOLDER   the same, and an SVG of what the pane shows at each station
    python -m tests.tools.tui_tour --screens FOLDER    every screen at four sizes with a pretended card, without tmux

At each step what the pane shows is looked at: texts that must be there, lines that must not be longer than the window,
the composer and the line of what goes on at the bottom, whole.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

from tests.support.files.real_model import smollm2  # noqa: E402
from tests.tools import tui_screens  # noqa: E402
from tests.tools.tmux_pane import Pane  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
SIZES = [(80, 24), (160, 50)]
SIDE = 33  # columns of the list of conversations
STORY = "Tell me a long story about a ship."


@pytest.fixture
def home(tmp_path):
    smollm2()  # skips by name where it is not installed
    return tmp_path


@pytest.mark.parametrize("size", SIZES, ids=["80x24", "160x50"])
def test_the_first_hour(home, size):
    tour(home, size, None)


def tour(home: Path, size: tuple[int, int], pictures: Path | None) -> None:
    """All of it, in two lives; pictures of the stations go there."""
    localq = (sys.executable, "-m", "localq")
    pane = Pane(home, size, *localq, pictures=pictures)
    try:
        choose(pane)
        converse(pane)
        look_around(pane)
        other_conversation(pane)
        leave(pane)
    finally:
        pane.close()
    pane = Pane(home, size, *localq, "chat", "--continue", pictures=pictures)
    try:
        pane.until("ready", "two and two")  # the last one that something was said in
        pane.whole()
        pane.keep("reopened")
        pane.send("Say hi.")
        pane.answered("Say hi.")
        pane.whole()
        pane.keep("continued")
        leave(pane)
    finally:
        pane.close()


def choose(pane: Pane) -> None:
    """The list of models; the embedded one is found by its name."""
    pane.until("smollm2-135m", "on the CPU")  # the verdicts are there
    pane.still()
    pane.keep("models")
    pane.type("smollm2-135m")
    pane.until("smollm2-135m", but="llama")
    pane.keep("filtered")
    pane.keys("Enter")
    pane.until("ready", "smollm2-135m")
    pane.whole()
    pane.keep("opened")


def converse(pane: Pane) -> None:
    """Ask, interrupt, answer again, say it otherwise."""
    pane.send(STORY)
    pane.answering(lines=6)
    pane.whole()
    pane.keep("answering")
    pane.keys("Escape")
    pane.until("stopped", "ready")
    pane.whole()
    pane.keep("interrupted")
    pane.send("/regen")
    pane.answering(lines=3)
    pane.keys("Escape")
    pane.until("2 of 2", "ready")
    pane.whole()
    pane.keep("regenerated")
    pane.send("/edit Name one ship, in one word.")
    pane.answered("Name one ship")
    pane.whole()
    pane.keep("edited")


def look_around(pane: Pane) -> None:
    """Help, and the instruments where they have no room beside the conversation."""
    pane.keys("F1")
    pane.until("Anywhere")
    pane.still()
    pane.keep("help")
    pane.keys("F1")
    pane.until("Name one ship", but="Anywhere")
    if pane.size[0] >= 120:
        pane.until("Memory ──")
        return
    pane.keys("F2")
    pane.until("weights ", "Name one ship")
    pane.still()
    pane.keep("strip")
    pane.keys("F2")
    pane.until("Memory ──", but="Name one ship")
    pane.still()
    pane.keep("instruments")
    pane.keys("F2")
    pane.until("Name one ship", but="Memory ──")


def other_conversation(pane: Pane) -> None:
    """Another one, and back by the list at the side."""
    pane.send("/set max_tokens 12")
    pane.until("max_tokens = 12")
    pane.answered("Name one ship")  # and the command is over
    pane.keys("C-n")
    pane.until("ready", but="Name one ship")
    pane.send("What is two and two?")
    pane.answered("two and two")
    pane.whole()
    pane.keys("C-s")
    pane.when(lambda shown: all(each in beside(shown) for each in ("Tell me", "What is two")), "both at the side")
    pane.still()
    pane.keep("conversations")
    pane.type("long story")
    pane.when(lambda shown: "Tell me" in beside(shown) and "What is two" not in beside(shown), "what was searched for")
    pane.keep("found")
    pane.keys("Enter")  # to the list
    pane.keys("Enter")
    pane.until("Name one ship", "ready", but="two and two")
    pane.keys("C-b")
    pane.when(lambda shown: "long story" not in beside(shown), "no list")
    pane.whole()
    pane.keep("switched")


def beside(shown: str) -> str:
    """What the columns at the left show."""
    return "\n".join(line[:SIDE] for line in shown.split("\n"))


def leave(pane: Pane) -> None:
    pane.keys("C-q")
    pane.until("goes on")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--pictures", type=Path)
    wanted.add_argument("--screens", type=Path)
    parser.add_argument(
        "--sizes", default=",".join(f"{width}x{height}" for width, height in tui_screens.SIZES), help="of --screens"
    )
    parser.add_argument("--only", default="", help="names of --screens, with commas")
    given = parser.parse_args()
    if given.screens:
        sizes = tuple((int(each.split("x")[0]), int(each.split("x")[1])) for each in given.sizes.split(","))
        only = tuple(filter(None, given.only.split(",")))
        if unknown := sorted(set(only) - set(tui_screens.SCREENS)):
            parser.error(f"--only: unknown: {', '.join(unknown)}; known: {', '.join(tui_screens.SCREENS)}")
        tui_screens.screens(given.screens, sizes, only or tui_screens.SCREENS)
        return 0
    folder = given.pictures
    folder.mkdir(parents=True, exist_ok=True)
    smollm2()
    for size in SIZES:
        with tempfile.TemporaryDirectory() as home:
            tour(Path(home), size, folder)
            print(f"{size[0]}x{size[1]}: the tour is done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
