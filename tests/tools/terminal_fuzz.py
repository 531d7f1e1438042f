"""Random keys, pastes, mouse reports and resizes while replies stream to a terminal; then it must be left as it was.

    python -m tests.tools.terminal_fuzz --events 10000 --seed 1 --face line

Every life of the program has surroundings of its own: without UTF-8, a dumb terminal, no colours. Wrong is: an end that
nobody asked for, a traceback, a terminal that is not put back, an answer that does not come any more when the terminal
has its size again. Last line: one JSON object; exit status 1 where anything was wrong.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.cli.terminal import Gave, Terminal
from tests.support.cli.terminal_engine import Script, latin
from tests.support.cli.terminal_faces import TRIES, Line, Place
from tests.support.text.tiny_tokenizers import SENTENCES
from tests.tools import terminal_campaign

SURROUNDINGS: tuple[dict[str, str], ...] = (
    {}, {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"TERM": "dumb"},
    {"NO_COLOR": "1"}, {"TERM": "screen-256color", "COLORTERM": ""}, {"TERM": "unknown-to-all"}, {"TERM": ""},
)  # fmt: skip
PLAIN = ("dumb", "")  # kinds of terminal without a line editor
EDITOR = {"VISUAL": "true"}  # Ctrl-G is among the noise: one that changes nothing, where vi would take what follows
# What the kernel holds for a plain terminal is answered line by line, and a Ctrl-C stands behind it; a full screen lays
# out what it was given at a size of one column.
PATIENT_TRIES = 10 * TRIES
LIFE = 250  # events of one process
PATIENCE_S = 0.3  # a program that answers takes no keys, where there is no line editor: what it leaves is dropped
SIZE = (80, 24)
SIZES = ((1, 1), (2, 1), (1, 2), (3, 3), (10, 2), (20, 5), (40, 10), (80, 24), (200, 60), (500, 5), (5, 200))
FORMS = "## {0}\n\n- *{0}* `{0}`\n\n```python\n{0}\n```\n\n| a | b |\n|---|---|\n| {0} | 1 |\n\n"
BLOCKS = {"line": len(SENTENCES), "tui": 6}  # in a reply: a thousand widgets are laid out anew in seconds


@dataclass
class Report(terminal_campaign.Report):
    """What was done, by kind, and what was wrong with it."""

    events: int = 0
    lives: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    bytes_out: int = 0


KEYS = (
    *"abc /.\\\"`#*", "é", "語", "🦙", "\u202e", "\t", "\r", "\n", "\x7f", "\x01", "\x05", "\x0b", "\x0c", "\x12",
    "\x15", "\x17", "\x19", "\x1b", "\x1b[A", "\x1b[B", "\x1b[C", "\x1b[D", "\x1b[H", "\x1b[F", "\x1b[3~", "\x1b[5~",
    "\x1b[6~", "\x1bOP", "\x1bf", "\x1b[13;2u", "\x1b[Z", "\x1b[1;5C", "\x1b[1;2A", "\x1b[I", "\x1b[O", "\x1b[99999;1u",
)  # fmt: skip
LINES = (
    "/help", "/regen", "/undo", "/sessions", "/set", "/nonsense", "/show params", "/tokens", "/stats", "hello", "//x",
    "/n 1", "/clear", "/new", "/copy", "/export md -", "/read /nowhere", "@/nowhere what", '"""', "\\",
)  # fmt: skip
# No keys: what is left out ends the input, stops the output, or ends the program by the kernel.
NOISE = [byte for byte in range(256) if byte not in (3, 4, 17, 19, 26, 28)]


class Fuzz:
    """The events of one life."""

    def __init__(self, face: Line, terminal: Terminal, rng: random.Random, report: Report, plain: bool) -> None:
        """plain: no line editor reads, but the kernel."""
        self.face, self.terminal, self.rng, self.report, self.plain = face, terminal, rng, report, plain
        self.ways: tuple[tuple[int, Callable[[], str]], ...] = (
            (50, self.key), (10, self.message), (15, self.resize), (10, self.mouse), (3, self.paste), (1, self.flood),
            (3, self.noise), (4, self.stop), (4, self.wait),
        )  # fmt: skip

    def event(self) -> None:
        """One of them, and what comes of it so far is read."""
        (way,) = self.rng.choices([way for _, way in self.ways], [weight for weight, _ in self.ways])
        self.report.kinds[way()] += 1
        self.report.events += 1
        self.terminal.read(0.0)

    def type(self, keys: str | bytes) -> None:
        """As far as it is taken."""
        self.terminal.send(keys, PATIENCE_S)

    def key(self) -> str:
        self.type(self.rng.choice(KEYS))
        return "key"

    def message(self) -> str:
        self.type(self.rng.choice(("tell me", self.rng.choice(LINES))) + "\r")
        return "message"

    def resize(self) -> str:
        self.terminal.resize(*self.rng.choice(SIZES))
        return "resize"

    def mouse(self) -> str:
        x, y = self.rng.choice(((1, 1), (40, 12), (79, 23), (500, 500), (self.rng.randint(1, 80), 3)))
        self.type(f"\x1b[<{self.rng.choice((0, 1, 2, 32, 35, 64, 65, 4, 99))};{x};{y}{self.rng.choice('Mm')}")
        return "mouse"

    def paste(self) -> str:
        text = "".join(self.rng.choices([*SENTENCES, "\n", "\x1b[31m", "\0", "\t"], k=self.rng.randint(1, 30)))
        self.type(f"\x1b[200~{text}\x1b[201~")
        return "paste"

    def flood(self) -> str:
        """1 MB; what a program does not read while it answers is too much for a terminal.

        Without a line editor each line is a message, and behind more than the kernel keeps (4 KB) a Ctrl-C waits its
        turn: there it is 2 KB.
        """
        line = self.rng.choice(SENTENCES) + self.rng.choice((" ", "\n"))
        if self.plain:
            self.terminal.send(line * (2**11 // len(line.encode())), patience_s=1.0)
            return "paste of 2 KB"
        size = 2**20 if self.report.kinds["paste of 1 MB"] < 1 + self.report.events // 2000 else 2**14
        self.terminal.send(f"\x1b[200~{line * (size // len(line.encode()))}\x1b[201~", patience_s=1.0)
        return "paste of 1 MB" if size == 2**20 else "paste of 16 KB"

    def noise(self) -> str:
        """Bytes that are no keys."""
        self.type(bytes(self.rng.choices(NOISE, k=8)))
        return "noise"

    def stop(self) -> str:
        self.terminal.catch_up()
        self.type(self.rng.choice(self.face.stops))
        return "stop"

    def wait(self) -> str:
        end = time.monotonic() + self.rng.uniform(0.0, 0.1)
        while (left := end - time.monotonic()) > 0:
            self.terminal.read(left)
        return "wait"


def life(face: Line, place: Place, rng: random.Random, report: Report, events: int) -> None:
    """One process: its start, events, the right size again, an answer, and the end."""
    environ = {**EDITOR, **rng.choice(SURROUNDINGS)}
    if environ.get("TERM") in PLAIN or "LC_ALL" in environ:
        face = Line()  # which is what any chat is there
    answer = "".join(FORMS.format(each) for each in rng.sample(SENTENCES, BLOCKS[face.name]))
    place.says(Script(step_s=0.001, step=rng.choice((1, 7, 100)), text=latin(answer), repeat=rng.choice((1, 1, 3))))
    with face.start(place, size=SIZE, **environ) as terminal:
        try:
            terminal.until(lambda: face.is_ready(terminal))
            face.say(terminal, "hello")
            fuzz = Fuzz(face, terminal, rng, report, environ.get("TERM") in PLAIN)
            for _ in range(events):
                if terminal.process.poll() is not None:
                    break
                fuzz.event()
            if terminal.process.poll() is None:
                recover(face, place, terminal, PATIENT_TRIES)
            face.leave(terminal)
        except Gave as error:
            report.wrong.append(f"{environ}: {error}")
        report.bytes_out += len(terminal.raw)
        verdict(terminal, environ, report)


def recover(face: Line, place: Place, terminal: Terminal, tries: int) -> None:
    """With its size again and a quiet user, it answers; a message may be refused once, while something runs still."""
    terminal.resize(*SIZE)
    terminal.send("\x1b[201~")  # a paste that was cut has not ended, and no key is one before
    place.says(Script(text="still here"))
    for last in (False, False, True):
        face.calm(terminal, tries)
        if terminal.process.poll() is not None:  # it was told to end before
            return
        face.say(terminal, "are you there?")
        with contextlib.suppress(*() if last else (Gave,)):
            terminal.until("still here", 10)
            face.calm(terminal, tries)  # that may have been the answer to what was typed before
            return


def verdict(terminal: Terminal, environ: dict[str, str], report: Report) -> None:
    """What a life that is over has left."""
    code = terminal.process.returncode
    if code is None:  # why is told already
        return
    if code not in (0, 130):
        report.wrong.append(f"{environ}: exit code {code}")
    if (place := terminal.raw.find(b"Traceback")) >= 0:
        report.wrong.append(f"{environ}: {bytes(terminal.raw[place : place + 16_000]).decode(errors='replace')}")
    report.wrong += [f"{environ}: {each}" for each in terminal.left_behind()]


def campaign(home: Path, face: Line, events: int, seed: int) -> Report:
    """At least `events`, in lives of their own."""
    rng, report = random.Random(seed), Report()
    while report.events < events and len(report.wrong) < 5:
        report.lives += 1
        life(face, Place(home / str(report.lives)), rng, report, min(LIFE, events - report.events))
    return report


if __name__ == "__main__":
    sys.exit(terminal_campaign.main(__doc__, "events", 1000, campaign))
