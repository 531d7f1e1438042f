"""How long the full screen takes from its start to the first whole frame: `python -m tests.tools.first_frame`.

    python -m tests.tools.first_frame --runs 3 --size 80x24

Starts `localq` in a pty, by itself, behind one start of each kind that is not counted: where nothing is kept yet, where
10,000 turns lie in 100 conversations, and going on with a conversation of 10,000 turns. The time counts from the fork
to the bytes that make the frame whole (its lowest rows are there); what the program writes is kept with the time it
came and drawn afterwards. Where a conversation is gone on with, also to the bytes that show its newest turn.
Processor time is that of the program up to the frame, all its threads.
Asserts nothing; last line: one JSON object, with the load and the processor time of starting Python with some of its
library, which says how fast the machine is (`pace`).
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from localq.chat.history.conversation import Message
from localq.chat.history.record import Record
from localq.chat.history.store import ConversationStore
from localq.chat.terminal import input_history
from localq.stats import Stats
from tests.support.cli.terminal import Gave, Terminal
from tests.support.cli.terminal_faces import EMPTY
from tests.support.cli.terminal_localq import environment
from tests.support.common import pace

ROOT = Path(__file__).parents[2]
LOCALQ = (sys.executable, "-m", "localq")
TURNS = 10_000
FIGURES = Stats("done", 50, generated_tokens=40, decode_s=1.0, context_used=90, context_size=8192)
NEWEST = "the newest answer"
MODEL = "smollm2-135m"
WAIT_S, SILENCE_S = 30.0, 0.02
Sees = Callable[[Terminal], bool]


# ---- what is kept


def nothing(home: Path) -> None:
    """A user's first start."""


def many(home: Path) -> None:
    """TURNS turns in 100 conversations."""
    for number in range(100):
        _talk(home, TURNS // 100, f"conversation {number}: ")


def long(home: Path) -> None:
    """TURNS turns in one conversation."""
    _talk(home, TURNS, "")


def _talk(home: Path, turns: int, about: str) -> None:
    """What was said, and what was typed for it."""
    record, typed = Record(model=MODEL), home / "state" / "localq" / "history"
    conversation = record.conversation
    typed.parent.mkdir(parents=True, exist_ok=True)
    for turn in range(0, turns, 2):
        question = f"{about}question {turn} {'about ships ' * 10}"
        answer = NEWEST if turn + 2 >= turns else f"answer {turn} {'of a kind ' * 20}"
        conversation.add(Message("assistant", answer), conversation.add_user(question), FIGURES)
        input_history.append(typed, question)
    ConversationStore(home / "data" / "sessions.db").save(record)


# ---- what is seen


def is_chat(terminal: Terminal) -> bool:
    """The message in its frame, and the painted line below it."""
    rows = terminal.text.split("\n")
    below = terminal.screen.buffer[terminal.screen.lines - 1][1].bg != "default"
    return EMPTY in terminal.text and rows[-2].startswith("╰") and rows[-2].rstrip().endswith("╯") and below


def is_newest(terminal: Terminal) -> bool:
    """The end of the conversation."""
    return NEWEST in terminal.text


CASES: dict[str, tuple[Callable[[Path], None], tuple[str, ...], dict[str, Sees]]] = {
    "chat, nothing kept": (nothing, ("chat", MODEL), {"frame_s": is_chat}),
    "tui, nothing kept": (nothing, ("tui",), {"frame_s": is_chat}),
    "chat, 100 conversations": (many, ("chat", MODEL), {"frame_s": is_chat}),
    "tui, 100 conversations": (many, ("tui",), {"frame_s": is_chat}),
    "chat --continue": (long, ("chat", "--continue"), {"frame_s": is_chat, "newest_s": is_newest}),
}


# ---- the measurement


def started(home: Path, arguments: tuple[str, ...], size: tuple[int, int], sees: tuple[Sees, ...]) -> list[float]:
    """Seconds to each of what is looked for, then those of the processor up to the first."""
    environ = environment(home)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    begun = time.monotonic()
    with Terminal((*LOCALQ, *arguments), environ, size, home) as terminal:
        found: list[tuple[float, float]] = []
        while len(found) < len(sees):
            for at, busy, data in written(terminal):
                terminal.take(data)
                while len(found) < len(sees) and sees[len(found)](terminal):
                    found.append((at - begun, busy))
            if time.monotonic() - begun > WAIT_S:
                raise Gave(f"not seen within {WAIT_S:g} s; on the screen:\n{terminal.text}")
    return [*(at for at, _ in found), found[0][1]]


def written(terminal: Terminal) -> list[tuple[float, float, bytes]]:
    """What is written until the program is silent for a moment, with the time and its processor time as it came: what
    would be drawn in between would keep the program waiting."""
    found, silence_s = list[tuple[float, float, bytes]](), WAIT_S
    process = psutil.Process(terminal.process.pid)
    while select.select([terminal.master], [], [], silence_s)[0]:
        at, times = time.monotonic(), process.cpu_times()
        found.append((at, times.user + times.system, os.read(terminal.master, 65536)))
        silence_s = SILENCE_S
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--size", default="80x24", help="columns x rows")
    given = parser.parse_args()
    columns, rows = map(int, given.size.split("x"))
    figures: dict[str, dict[str, float]] = {}
    for name, (kept, arguments, sees) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            kept(Path(folder))
            runs = [
                started(Path(folder), arguments, (columns, rows), tuple(sees.values())) for _ in range(given.runs + 1)
            ][1:]
        names = (*sees, "processor_s")
        medians = [round(statistics.median(each), 3) for each in zip(*runs, strict=True)]
        figures[name] = dict(zip(names, medians, strict=True))
        print(name, figures[name], [round(run[0], 3) for run in runs], flush=True)
    python_s = round(statistics.median(pace.start_s() for _ in range(5)), 3)
    about = {"size": given.size, "runs": given.runs, "load": round(os.getloadavg()[0], 1), "python_s": python_s}
    print(json.dumps({**about, **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
