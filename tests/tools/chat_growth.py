"""Asks for hundreds of replies in one chat at a terminal, and looks at what its processes hold after each.

    python -m tests.tools.chat_growth --replies 400 --face line

Memory is what the front end and the engine process have in anonymous pages; descriptors and threads are counted. Each
reply is in a conversation of its own, which is saved: what was said is no part of the growth, but two lines of input
history and the command /new are. What the first hundred replies fill, caches and buffers, is there to stay; from then
on a reply may take 1 kB, descriptors stay as many, and threads no more than before. `--real_engine` has the product's
engine with a tiny model, else it is a scripted one. Last line: one JSON object; exit status 1 where anything grows.

bytes_per_reply is what a process holds after the last reply above what it held after the first of those, divided; slope
is the median over all pairs of replies, which a single step does not move; largest_step is the most that one reply
added. Python's allocator gives no page back while its arena of 1 MB has an object in it, so what the fullest moment so
far took stays: steps of up to 0.07 MB were seen. Linear regression counts a step in the middle one and a half times.
Both bytes_per_reply and slope must be at most 1 kB; of 160 replies after the hundredth one step is 0.4 kB a reply.

Pages of files do not count: those of a library turn from shared to private when the last other process that has loaded
it ends, which added 1 MB to a run. The processes run with MALLOC_TRIM_THRESHOLD_=0, MALLOC_TOP_PAD_=0 and
MALLOC_ARENA_MAX=1: by itself glibc keeps up to 0.7 MB of what was freed at the top of the heap, and gives it back and
takes it again in steps of 0.4 MB, which are 2 kB a reply up or down over 300 replies; with its pad, 0.1 MB stay at the
top, written to or not. A start before the one that is measured compiles the modules: that leaves 5 MB of free memory
behind, in which 1 kB a reply is not seen. Threads that are about to end are waited for.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.cli.terminal import Gave, Terminal
from tests.support.cli.terminal_engine import Script
from tests.support.cli.terminal_faces import Line, Place
from tests.support.cli.terminal_localq import environment
from tests.tools import terminal_campaign
from tests.tools.process_tree import descendants

SIZE = (100, 30)
WARM, REPLY_BYTES = 100, 1024  # replies that fill caches; what each further one may take
EXACT = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0", "MALLOC_ARENA_MAX": "1"}  # free pages are not held
EXACT |= {"PYTHONDONTWRITEBYTECODE": ""}  # so that the second start compiles nothing
CHILDREN = {"engine": (b"terminal_engine", b"worker.server"), "templates": (b"text.template_child",)}
ENDS_S = 1.0  # within which a thread of the last reply has ended
_HELD = re.compile(r"^(?:Anonymous|Swap): +(\d+) kB", re.MULTILINE)


@dataclass
class Report(terminal_campaign.Report):
    """By process, after each reply: (bytes, descriptors, threads)."""

    replies: int = 0
    held: defaultdict[str, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))

    def figures(self) -> dict[str, object]:
        """As printed."""
        return {
            "replies": self.replies,
            **{name: growth(held) for name, held in self.held.items()},
            "wrong": self.wrong,
        }


def growth(held: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Bytes per reply after the first hundred, and how many descriptors and threads there were."""
    late = held[min(WARM, len(held) // 2) :]
    size = [each[0] for each in late]
    return {
        "bytes_per_reply": round((size[-1] - size[0]) / max(1, len(size) - 1)),
        "slope": round(_slope(size)),
        "largest_step": max((after - before for before, after in itertools.pairwise(size)), default=0),
        "descriptors": sorted({each[1] for each in late}),
        "threads": sorted({each[2] for each in late}),
    }


def _slope(size: list[int]) -> float:
    """By Theil and Sen: the median of what lies between any two replies."""
    pairs = itertools.combinations(enumerate(size), 2)
    return statistics.median([(late - early) / (there - here) for (here, early), (there, late) in pairs] or [0.0])


def holdings(process: int, threads: int) -> tuple[int, int, int]:
    """(bytes in anonymous pages, descriptors, threads) of a process, which had so many `threads` before."""
    folder, end = Path(f"/proc/{process}"), time.monotonic() + ENDS_S
    while len(os.listdir(folder / "task")) > threads and time.monotonic() < end:
        time.sleep(0.005)
    pages = sum(map(int, _HELD.findall((folder / "smaps_rollup").read_text())))
    return 1024 * pages, len(os.listdir(folder / "fd")), len(os.listdir(folder / "task"))


def processes(terminal: Terminal) -> dict[str, int]:
    """The front end, and below it the engine process and the one that renders templates."""
    found = {"front end": terminal.process.pid}
    for process in descendants(terminal.process.pid):
        try:
            line = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        found |= {name: process for name, modules in CHILDREN.items() if any(each in line for each in modules)}
    return found


def real(face: Line, place: Place) -> Terminal:
    """A chat with the product's engine and a tiny model."""
    from tests.support.files.hostile_models import write_sound

    model = place.home / "real"
    if not model.exists():
        write_sound(model)
    command = [sys.executable, "-m", "localq", "chat", str(model), "-n", "8"]
    environ = environment(place.home, LOCALQ_UI=face.ui, OMP_NUM_THREADS="1", **EXACT)
    return Terminal(command, environ, SIZE, place.home)


def campaign(home: Path, face: Line, count: int, seed: int, real_engine: bool = False) -> Report:
    """`count` replies."""
    report, place = Report(), Place(home / "growth")
    place.says(Script(text="Hello, and *so* on.\n\n- one\n- two\n", step=5))

    def start() -> Terminal:
        return real(face, place) if real_engine else face.start(place, size=SIZE, **EXACT)

    with start() as terminal:
        terminal.until(lambda: face.is_ready(terminal), 120)
        face.exchange(terminal, "compile")
        face.leave(terminal)
    with start() as terminal:
        try:
            terminal.until(lambda: face.is_ready(terminal), 120)
            while report.replies < count:
                face.exchange(terminal, f"say {report.replies}")
                face.exchange(terminal, "/new")
                report.replies += 1
                for name, process in processes(terminal).items():
                    held = report.held[name]
                    held.append(holdings(process, min((each[2] for each in held), default=1)))
                terminal.raw.clear()
            face.leave(terminal)
        except Gave as error:
            report.wrong.append(str(error))
    report.wrong += [each for name, held in report.held.items() for each in faults(name, held)]
    return report


def faults(name: str, held: list[tuple[int, int, int]]) -> list[str]:
    """What a process holds more, which it must not."""
    late = held[min(WARM, len(held) // 2) :]
    half, found = len(late) // 2, growth(held)
    size = max(found["bytes_per_reply"], found["slope"])
    wrong = [f"{name}: {size} bytes a reply"] if size > REPLY_BYTES else []
    for place, what in ((1, "descriptors"), (2, "threads")):
        before, after = (max(each[place] for each in part) for part in (late[:half] or late, late[half:]))
        wrong += [f"{name}: {after} {what}, {before} before"] if after > before else []
    return wrong


if __name__ == "__main__":
    sys.exit(terminal_campaign.main(__doc__, "replies", 400, campaign, real_engine="with the product's engine"))
