"""How many bytes a second a reply that streams sends to the terminal: `python -m tests.tools.stream_bytes`.

    python -m tests.tools.stream_bytes --face tui --tokens 100 --size 80x24

What goes over the line where the terminal is far away, by SSH. Tokens have four bytes, as those of English have. Last
line: one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.support.cli.terminal_engine import Script
from tests.support.cli.terminal_faces import FACES, Line, Place
from tests.tools.typing_latency import REPLY

TOKEN_BYTES = 4
STEPS_PER_S = 100


def measured(home: Path, face: Line, tokens_per_s: int, size: tuple[int, int], seconds: int) -> list[int]:
    """Bytes of each second, from the first of the reply on."""
    place, step = Place(home), max(1, tokens_per_s // STEPS_PER_S)
    place.says(Script(step=step * TOKEN_BYTES, step_s=step / tokens_per_s, text=REPLY, repeat=0))
    with face.start(place, size=size, COLORTERM="") as terminal:  # SSH does not pass it on
        terminal.until(lambda: face.is_ready(terminal))
        face.say(terminal, "go")
        terminal.until(lambda: face.has_begun(terminal))
        found, start = list[int](), time.monotonic()
        for second in range(1, seconds + 1):
            before = len(terminal.raw)
            while (left := start + second - time.monotonic()) > 0:
                terminal.read(left)
            found.append(len(terminal.raw) - before)
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--face", choices=list(FACES), default="tui")
    parser.add_argument("--tokens", type=int, default=100, help="a second")
    parser.add_argument("--size", default="80x24", help="columns x rows")
    parser.add_argument("--seconds", type=int, default=20)
    given = parser.parse_args()
    columns, rows = map(int, given.size.split("x"))
    with tempfile.TemporaryDirectory() as home:
        found = measured(Path(home), FACES[given.face](), given.tokens, (columns, rows), given.seconds)
    figures = {"mean": sum(found) // len(found), "most": max(found)}
    print(json.dumps({"face": given.face, "size": given.size, "tokens_per_s": given.tokens, "bytes_per_s": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
