"""Presses Ctrl-C (and Esc) at random moments of a chat at a terminal, and looks at what becomes of it.

    python -m tests.tools.terminal_interrupts --events 300 --seed 1 --face line

While a model loads, a prompt is read, a reply thinks or answers, at the empty prompt, and twice: the first press stops
the reply, which keeps what had come of it, the next leave with exit code 0, and the terminal is as it was. The time
from the key to what the screen says of it is measured. Last line: one JSON object; exit status 1 where anything was
wrong.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from localq.chat.history.store import ConversationStore
from tests.support.cli.terminal import CTRL_C, ESCAPE, Gave, Terminal
from tests.support.cli.terminal_engine import Script, latin
from tests.support.cli.terminal_faces import Line, Place
from tests.tools import terminal_campaign

LIFE = 8  # replies that one process is asked for
LIMIT_S = 0.2  # what a user may wait for a reply to stop
PHASES = ("reading", "answering", "answering", "thinking", "prompt", "twice")
WORDS = "wörter und слова 字 "
THOUGHT = "<think>\nhm, "


@dataclass
class Report(terminal_campaign.Report):
    """What was seen. latencies_s: from the key to the screen, by phase. wrong: what must not be."""

    events: int = 0
    lives: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    latencies_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def figures(self) -> dict[str, object]:
        """As printed: milliseconds at the median and the 99th percentile, and how many were late."""
        times = {
            phase: {
                "p50_ms": round(1e3 * statistics.median(found), 1),
                "p99_ms": round(1e3 * sorted(found)[min(len(found) - 1, int(len(found) * 0.99))], 1),
                "late": sum(each > LIMIT_S for each in found),
            }
            for phase, found in sorted(self.latencies_s.items())
        }
        return {
            "events": self.events,
            "lives": self.lives,
            "phases": self.phases,
            "latency": times,
            "wrong": self.wrong,
        }


class Life:
    """One process, from its start to its end."""

    def __init__(self, face: Line, place: Place, rng: random.Random, report: Report) -> None:
        self.face, self.place, self.rng, self.report = face, place, rng, report
        self.replies = self.stopped = 0
        self.at_prompt = 0.0  # when a press there may have been the last time

    def press(self, terminal: Terminal, key: str, phase: str) -> float:
        """One interrupt; the time of the key."""
        self.report.events += 1
        self.report.phases[phase] += 1
        moment = time.monotonic()
        terminal.send(key)
        return moment

    def pause(self, terminal: Terminal, seconds: float) -> None:
        """Read for so long: the moment of the press is what is random."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            terminal.read(left)

    def run(self) -> None:
        """Replies, interrupts, and the end by two of them."""
        with self.face.start(self.place) as terminal:
            try:
                terminal.until(lambda: self.face.is_ready(terminal))
                for _ in range(LIFE):
                    self.reply(terminal, self.rng.choice(PHASES))
                    if terminal.process.poll() is not None:
                        return self.ended(terminal, "twice")
                self.leave(terminal)
            except Gave as error:
                self.report.wrong.append(str(error))

    def reply(self, terminal: Terminal, phase: str) -> None:
        """Ask, press in `phase`, and see it stop."""
        if phase == "prompt":
            over, hints = terminal.process.poll, self.face.hints(terminal)
            self.press(terminal, CTRL_C, phase)
            terminal.until(lambda: over() is not None or self.face.has_hinted(terminal, hints))
            terminal.until(lambda: over() is not None or self.face.is_ready(terminal))
            self.second(terminal)
            return
        self.replies += 1
        self.place.says(script(phase, self.replies))
        self.face.say(terminal, f"say {self.replies}.")
        terminal.until(lambda: self.face.has_begun(terminal))
        if phase in ("answering", "twice"):
            terminal.until(f"{self.replies}{WORDS}")
        self.pause(terminal, self.rng.uniform(0.0, 0.4))
        key = self.rng.choice(self.face.stops)
        moment = self.press(terminal, key, phase)
        self.stopped += 1
        if phase == "twice":
            self.pause(terminal, self.rng.uniform(0.0, 0.1))
            self.press(terminal, CTRL_C, phase)
            terminal.until(lambda: terminal.process.poll() is not None or self.rests(terminal))
            self.pause(terminal, 0.3)  # the second press may be heard only now, and told of
            terminal.until(lambda: terminal.process.poll() is not None or self.rests(terminal))
            self.second(terminal)
            return
        name = f"{phase}, {'Esc' if key == ESCAPE else 'Ctrl-C'}"
        terminal.until(lambda: self.face.has_reacted(terminal, self.stopped))
        self.report.latencies_s[name].append(time.monotonic() - moment)
        terminal.until(lambda: self.face.is_stopped(terminal, self.stopped))
        self.report.latencies_s[f"{name}, ended"].append(time.monotonic() - moment)
        terminal.until(lambda: self.face.is_ready(terminal))

    def second(self, terminal: Terminal) -> None:
        """A press at the empty prompt may have been the second one there: then the process ends."""
        before, self.at_prompt = self.at_prompt, time.monotonic()
        if self.at_prompt - before < 3.0:
            with contextlib.suppress(Gave):
                terminal.until(lambda: terminal.process.poll() is not None, 5.0)

    def rests(self, terminal: Terminal) -> bool:
        """The second press came when the first had done its work: the chat waits for a message."""
        return self.face.is_stopped(terminal, self.stopped) and self.face.is_ready(terminal)

    def leave(self, terminal: Terminal) -> None:
        """Two presses at the empty prompt."""
        hints = self.face.hints(terminal)
        self.press(terminal, CTRL_C, "leave")
        terminal.until(lambda: self.face.has_hinted(terminal, hints) or terminal.process.poll() is not None)
        self.press(terminal, CTRL_C, "leave")
        self.ended(terminal, "leave")

    def ended(self, terminal: Terminal, phase: str) -> None:
        """Whatever happened: the exit code, the terminal, no traceback, and the replies in the store."""
        code = terminal.wait()
        allowed = (0,) if phase == "leave" else (0, 130)  # a second press may interrupt what still runs
        if code not in allowed:
            self.report.wrong.append(f"{phase}: exit code {code}:\n{terminal.scrolled[-3000:]}")
        self.report.wrong += [f"{phase}: {each}" for each in terminal.left_behind()]
        if b"Traceback" in terminal.raw:
            self.report.wrong.append(f"{phase}: a traceback:\n{terminal.scrolled[-3000:]}")
        self.kept()

    def kept(self) -> None:
        """Every reply of which something had come is stored, as far as it came, and marked as cut."""
        store = ConversationStore(self.place.home / "data" / "sessions.db")
        for turn in store.load(store.summaries()[0].id).conversation.turns if self.replies else []:
            message = turn.message
            if message.role != "assistant":
                continue
            if message.complete:
                self.report.wrong.append("a reply that was stopped is kept as whole")
            if THOUGHT.startswith(message.content):  # stopped before its first word
                continue
            body = message.content.removeprefix(THOUGHT).lstrip("0123456789")
            if not (WORDS * (len(body) // len(WORDS) + 1)).startswith(body):
                self.report.wrong.append(f"another text is kept: {message.content[:200]!r}")


def script(phase: str, number: int) -> Script:
    """What the engine does while the press is awaited; a reply says which it is."""
    if phase == "thinking":
        return Script(step_s=0.002, text=latin(f"{THOUGHT}{number}{WORDS * 10_000}"))
    prefill_s = 30 if phase == "reading" else 0
    return Script(prefill_s=prefill_s, step_s=0.002, text=latin(f"{number}{WORDS * 10_000}"))


def load_interrupted(face: Line, place: Place, rng: random.Random, report: Report) -> None:
    """The model loads: there is nothing to keep, and the chat ends."""
    place.says(Script(load_s=30))
    with face.start(place) as terminal:
        try:
            terminal.until("loading weights")
            Life(face, place, rng, report).pause(terminal, rng.uniform(0.0, 0.3))
            for press in range(face.presses_while_loading):
                if press:
                    terminal.until(face.hint)
                moment = Life(face, place, rng, report).press(terminal, CTRL_C, "loading")
            code = terminal.wait(10)
            report.latencies_s["loading"].append(time.monotonic() - moment)
        except Gave as error:
            report.wrong.append(str(error))
            return
        if code != 130 or b"Traceback" in terminal.raw:
            report.wrong.append(f"loading: exit code {code}:\n{terminal.scrolled[-3000:]}")
        report.wrong += [f"loading: {each}" for each in terminal.left_behind()]


def campaign(home: Path, face: Line, events: int, seed: int) -> Report:
    """At least `events` presses."""
    rng, report = random.Random(seed), Report()
    while report.events < events and len(report.wrong) < 5:
        report.lives += 1
        place = Place(home / str(report.lives))
        if report.lives % 3 == 0:
            load_interrupted(face, place, rng, report)
        else:
            Life(face, place, rng, report).run()
    return report


if __name__ == "__main__":
    sys.exit(terminal_campaign.main(__doc__, "events", 60, campaign))
