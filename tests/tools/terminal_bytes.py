"""Says to a terminal, by every way a foreign text can take, what would act on it, and looks for it in what is written.

    python -m tests.tools.terminal_bytes --strings 100000 --seed 1 --face line

The ways: answers and thoughts of a model, its name, its template's refusal, the engine's notes and errors, messages
typed, pasted and recalled, system prompts, titles, file names, the hub. `--canary` switches the sanitizer off: then
something must be found. Last line: one JSON object; exit status 1 where anything was found.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq.chat.history.conversation import Message
from localq.chat.history.record import Record
from localq.chat.history.store import ConversationStore
from tests.support.cli.hostile_sequences import ACTING, Watch, random_text
from tests.support.cli.terminal import ESCAPE, Gave
from tests.support.cli.terminal_engine import Script, latin
from tests.support.cli.terminal_faces import Line, Place
from tests.tools import terminal_campaign

BATCH = 500  # random strings of one reply: about as many as a screen of `LARGE` shows
LARGE = (240, 100)


@dataclass
class Report(terminal_campaign.Report):
    """tokens: pieces that the terminal was given. wrong: what it must not be given."""

    strings: int = 0
    tokens: int = 0


class Watched:
    """A face with every token looked at; what is found carries where it was."""

    def __init__(self, face: Line, place: Place, report: Report, *more: str, **environ: str) -> None:
        self.face, self.place, self.report = face, place, report
        self.watch = Watch()
        self.terminal = face.start(place, *more, size=LARGE, **environ)
        self.terminal.on_token = self.watch
        self.where, self.count = "start", 0

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.told(self.where)
        self.terminal.close()

    def told(self, where: str) -> None:
        """What was written since the last time belongs to `where`."""
        self.report.wrong += [f"{self.where}: {each}" for each in self.watch.wrong]
        self.report.tokens += self.watch.seen
        self.watch.wrong, self.watch.seen, self.where = [], 0, where

    def rest(self) -> None:
        """Until a message can be sent."""
        self.terminal.until(lambda: self.face.is_ready(self.terminal))

    def ask(self, where: str, said: str, text: str = "say it", **more: Any) -> None:
        """A message and the whole reply, which is `said`, and an end of its own; more: of `Script`."""
        self.told(where)
        self.count += 1
        end = f"this is the end of number {self.count}"
        self.place.says(Script(text=latin(f"{said}\n\n{end}"), **more))
        self.face.exchange(self.terminal, text, end)

    def command(self, text: str, where: str = "") -> None:
        """A slash command and what it tells."""
        self.told(where or text)
        self.face.exchange(self.terminal, text)

    def leave(self) -> None:
        """The end, as a user would."""
        self.told("leaving")
        self.face.leave(self.terminal)


def name_of(payload: str) -> str:
    """As a file name."""
    return payload.replace("/", "|").replace("\0", "")


def grouped(payloads: dict[str, str], size: int = 6) -> dict[str, str]:
    """Several in one text, because a message takes a full screen its time."""
    names = list(payloads)
    groups = [names[place : place + size] for place in range(0, len(names), size)]
    return {", ".join(group): " ".join(payloads[name] for name in group) for group in groups}


def replies(seen: Watched, payloads: dict[str, str]) -> None:
    """Answers, thoughts and errors."""
    everything = "\n\n".join(payloads.values())
    seen.ask("answer", everything, step=3)
    seen.ask("answer in a block of code", f"```python\n{everything}\n```", step=100)
    seen.ask("thought", f"<think>{everything}</think>", step=5)
    seen.ask("half a letter", "caf\x1b[\ud83e")
    for way, payload in payloads.items():
        seen.ask(f"failure, {way}", "so far", fails=payload)


def typed(seen: Watched, payloads: dict[str, str]) -> None:
    """Messages: pasted, sent, recalled; and commands that do not exist."""
    for way, payload in payloads.items():
        harmless = payload.replace("\x1b[201~", "").replace("\r", "").replace("\n", " ")
        seen.ask(f"pasted, {way}", "ok", f"\x1b[200~{harmless} .\x1b[201~")
    seen.told("recalled")
    for _ in range(len(payloads)):
        seen.terminal.send("\x1b[A")
        seen.terminal.read(0.02)
    seen.face.calm(seen.terminal)


def commands(seen: Watched, payloads: dict[str, str]) -> None:
    """What is shown of names, titles, files and prompts."""
    folder = seen.place.home / "files"
    folder.mkdir(exist_ok=True)
    for place, (way, payload) in enumerate(payloads.items()):
        name = name_of(payload)[:200]
        (folder / f"f{place}{name}").write_text(payload, "utf-8", errors="replace")
        if not set(name) & set("\r\n"):
            seen.command(f"\x1b[200~/read {folder}/f{place}{name} \x1b[201~", f"file name, {way}")
            seen.command(f"\x1b[200~/resume {name} .\x1b[201~", f"title that is none, {way}")
            seen.command(f"\x1b[200~/save {name} .\x1b[201~", f"title, {way}")
    for line in (
        f"/system @{min(folder.iterdir())}", "/system", "/show prompt", "/show template", "/stats", "/set",
        "/sessions", "/n", "/tokens", "/export md", "/export json", "/copy", "/undo", "/nonsense", "/new", "/sessions",
    ):  # fmt: skip
        seen.command(line)


def views(seen: Watched) -> None:
    """What else a full screen can show: every key that opens something, and closes it again."""
    for key in seen.face.keys:
        seen.told(f"key {key!r}")
        seen.terminal.send(key)
        seen.terminal.settle()
        seen.terminal.send(key if key in "\x02\x14\x1bOQ" else ESCAPE)
        seen.terminal.settle()
    seen.face.calm(seen.terminal)


def store(home: Path) -> None:
    """Conversations as an older program or another user may have kept them, nothing taken out; the last holds all."""
    kept, last = ConversationStore(home / "data" / "sessions.db"), Record(model="model", title="all of it")
    for way, payload in ACTING.items():
        session = Record(model=f"{payload} {way}", title=f"{payload} {way}")
        session.conversation.system = payload
        for content in (payload, f"```{payload}\n{payload}\n```", f"<think>{payload}</think>{payload}"):
            for conversation in (session.conversation, last.conversation):
                conversation.add(Message("user", f"{way} {content}"), conversation.head)
                conversation.add(Message("assistant", f"{way} {content}"), conversation.head)
        kept.save(session)
    kept.save(last)


def ways(home: Path, face: Line, report: Report, **environ: str) -> None:
    """The quickest of each kind: names, an answer, a thought, a failure, a paste, a title, a list."""
    place = Place(home / "ways", name_of("model" + "".join(ACTING[way] for way in sorted(ACTING))[:60]))
    place.says(Script(notes=tuple(ACTING.values()), device_name=ACTING["title"] + "CPU" + ACTING["C1 CSI"]))
    store(place.home)
    with Watched(face, place, report, **environ) as seen:
        seen.rest()
        payload = " ".join(ACTING.values())
        seen.ask("answer", f"<think>{payload}</think>{payload}")
        seen.ask("failure", "so far", fails=payload)
        typed(seen, {"all": payload})
        seen.command("/sessions")
        seen.command("/resume 1")
        seen.leave()


def corpus(home: Path, face: Line, report: Report, **environ: str) -> None:
    """Every way, with every payload."""
    place = Place(home / "corpus", name_of("model" + "".join(ACTING[way] for way in sorted(ACTING))[:60]))
    place.says(Script(notes=tuple(ACTING.values()), device_name=ACTING["title"] + "CPU" + ACTING["C1 CSI"]))
    with Watched(face, place, report, "--stats", **environ) as seen:
        seen.rest()
        for part in (replies, typed, commands):
            part(seen, grouped(ACTING))
        views(seen)
        seen.leave()
    place = Place(home / "stored")
    store(place.home)
    with Watched(face, place, report, "--continue", **environ) as seen:
        seen.rest()
        seen.command("/sessions")
        views(seen)
        for number in (3, 12, len(ACTING)):
            seen.command(f"/resume {number}")
        seen.leave()


def strings(home: Path, face: Line, report: Report, count: int, seed: int, **environ: str) -> None:
    """Random ones, in replies of `BATCH`."""
    rng = random.Random(seed)
    while report.strings < count and not report.wrong:
        place = Place(home / f"strings {report.strings}")
        with Watched(face, place, report, "--no-save", "--max-tokens", "max", **environ) as seen:
            seen.rest()
            for batch in batches(rng, min(count - report.strings, 5 * BATCH)):
                seen.ask("random strings", "\n".join(batch), step=rng.choice((1, 7, 300)))
                report.strings += len(batch)
                seen.command("/new")
            seen.leave()


def batches(rng: random.Random, count: int) -> Iterator[list[str]]:
    """`count` strings."""
    while count > 0:
        yield [f"{number}# {random_text(rng)}" for number in range(min(count, BATCH))]
        count -= BATCH


def campaign(home: Path, face: Line, count: int, seed: int, canary: bool = False) -> Report:
    """The corpus, then `count` random strings."""
    report, environ = Report(), {"LOCALQ_TEST_UNSAFE": "1"} if canary else {}
    try:
        corpus(home, face, report, **environ)
        strings(home, face, report, count, seed, **environ)
    except Gave as error:
        report.wrong.append(str(error))
    return report


if __name__ == "__main__":
    sys.exit(terminal_campaign.main(__doc__, "strings", 5000, campaign, canary="without the sanitizer"))
