"""How long a key takes to be seen while a reply streams to the full screen: `python -m tests.tools.typing_latency`.

    python -m tests.tools.typing_latency --keys 200 --tokens 600
    python -m tests.tools.typing_latency --keys 200 --tokens 2400 --code 600

Long replies with prose, lists and code stream one after the other; keys come one by one, and the time counts from the
key to the byte that shows it. What the terminal gets is only searched, not drawn: the time is that of the program. Last
line: one JSON object, with the load of the machine, since whatever else runs takes its part; exit status 1 where half
of the keys took longer than a user may notice (50 ms).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.support.cli.terminal import Gave, Terminal
from tests.support.cli.terminal_engine import Script
from tests.support.cli.terminal_faces import Place, Tui

LIMIT_S = 0.05
SENTENCE = "The ship left at dawn with **nobody** on deck but the cook, who had `slept` badly and was on his own. "
CODE = "def f(y):\n    return y + 1\n" * 4
REPLY = (
    f"{SENTENCE * 4}\n\n## What comes\n\n{SENTENCE * 3}\n\n- one thing\n- another *one*\n- a third\n\n"
    f"```python\n{CODE}```\n\n"
)
REPLIES = 20  # of these in one: 18 kB
FUNCTION = (
    "def at_{0}(table: dict[str, int], limit: int = {0}) -> list[str]:\n"
    '    """Names below `limit`, the {0}th of their kind."""\n'
    "    found = [name for name, count in table.items() if count < limit]  # of all\n"
    "    return sorted(found, key=lambda name: (table[name], name))\n\n\n"
)
WAIT_S = 10.0
LINE = 24  # keys, then the message is emptied
LETTERS = "XZJKVQ"  # not in the reply


def shown_after(terminal: Terminal, wanted: bytes) -> float:
    """Seconds until `wanted` is written."""
    start, seen = time.monotonic(), b""
    while wanted not in seen:
        left = start + WAIT_S - time.monotonic()
        if left <= 0:
            raise Gave(f"{wanted!r} was not shown within {WAIT_S:g} s")
        if select.select([terminal.master], [], [], left)[0]:
            seen = seen[-len(wanted) :] + os.read(terminal.master, 65536)
    return time.monotonic() - start


def drain(terminal: Terminal, seconds: float) -> None:
    """Read what comes for so long, and look at nothing."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([terminal.master], [], [], left)[0]:
            os.read(terminal.master, 65536)


def reply(code: int) -> str:
    """What is streamed; code: one block of so many lines, 0 = prose with a little of it."""
    lines = [line for number in range(code // 6 + 1) for line in FUNCTION.format(number).splitlines(keepends=True)]
    return f"```python\n{''.join(lines[:code])}```\n\n" if code else REPLY * REPLIES


def measured(home: Path, keys: int, tokens_per_s: int, seed: int, size: tuple[int, int], code: int) -> list[float]:
    """Seconds of each key."""
    rng, face, place, text = random.Random(seed), Tui(), Place(home), reply(code)
    step = max(1, tokens_per_s // 200)
    place.says(Script(step=step, step_s=step / tokens_per_s, text=text))
    found: list[float] = []
    with face.start(place, size=size) as terminal:
        terminal.until(lambda: face.is_ready(terminal))
        lasts_s = len(text) / tokens_per_s
        while len(found) < keys:
            face.say(terminal, "go")
            terminal.until(lambda: face.has_begun(terminal))
            end = time.monotonic() + lasts_s - 1
            while len(found) < keys and time.monotonic() < end:
                line(terminal, rng, found)
            terminal.send("\x1b")
            drain(terminal, 1.0)
            terminal.resize(size[0], size[1] - 1)  # what was not looked at is drawn once more
            terminal.resize(*size)
            terminal.until(lambda: face.is_ready(terminal))
    return found[:keys]


def line(terminal: Terminal, rng: random.Random, found: list[float]) -> None:
    """Type some keys and take them back."""
    for count in range(LINE):
        drain(terminal, rng.uniform(0.03, 0.12))
        letter = LETTERS[count % len(LETTERS)]
        terminal.send(letter)
        found.append(shown_after(terminal, letter.encode()))
    terminal.send("\x1b[18~\x7f")  # F7 takes all of it, and Backspace deletes it
    drain(terminal, 0.3)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=600, help="a second, of one byte each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", default="80x24", help="columns x rows")
    parser.add_argument("--code", type=int, default=0, help="replies are one block of code of so many lines each")
    given = parser.parse_args()
    columns, rows = map(int, given.size.split("x"))
    with tempfile.TemporaryDirectory() as home:
        found = sorted(measured(Path(home), given.keys, given.tokens, given.seed, (columns, rows), given.code))
    figures = {
        "keys": len(found), "size": given.size, "tokens_per_s": given.tokens, "code": given.code,
        "median_ms": round(1e3 * statistics.median(found), 1), "p90_ms": round(1e3 * found[int(0.9 * len(found))], 1),
        "p99_ms": round(1e3 * found[int(0.99 * len(found))], 1), "load": round(os.getloadavg()[0], 1),
        "worst_ms": round(1e3 * found[-1], 1), "late": sum(each > LIMIT_S for each in found),
    }  # fmt: skip
    print(json.dumps(figures))
    return int(statistics.median(found) > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
