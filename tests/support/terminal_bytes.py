"""Says to a terminal, by every way a foreign text can take, what would act on it, and looks for it in what is written.

    python tests/support/terminal_bytes.py --strings 100000 --seed 1 --face line

The ways: answers and thoughts of a model, its name, its template's refusal, the engine's notes and errors, messages
typed, pasted and recalled, system prompts, titles, file names, the hub. `--canary` switches the sanitizer off: then
something must be found. Last line: one JSON object; exit status 1 where anything was found.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hostile_sequences import ACTING, Watch, random_text
from terminal import Gave
from terminal_engine import Script, latin
from terminal_faces import FACES, Line, Place

BATCH = 2000  # random strings of one reply
END = "\n\nthe end"


@dataclass
class Report:
    """tokens: pieces that the terminal was given. wrong: what it must not be given."""

    strings: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


class Watched:
    """A face with every token looked at; what is found carries where it was."""

    def __init__(self, face: Line, place: Place, report: Report, *more: str, **environ: str) -> None:
        self.face, self.place, self.report = face, place, report
        self.watch = Watch()
        self.terminal = face.start(place, *more, size=(160, 50), **environ)
        self.terminal.on_token = self.watch
        self.where = "start"

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

    def ask(self, where: str, script: Script, text: str = "say it") -> None:
        """A message and the whole reply."""
        self.told(where)
        self.place.says(script)
        self.face.exchange(self.terminal, text)

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


def replies(seen: Watched, payloads: dict[str, str]) -> None:
    """Answers, thoughts and errors."""
    everything = "\n\n".join(payloads.values())
    seen.ask("answer", Script(step=3, text=latin(everything + END)))
    seen.ask("answer in a block of code", Script(step=100, text=latin(f"```python\n{everything}\n```{END}")))
    seen.ask("thought", Script(step=5, text=latin(f"<think>{everything}</think>{END}")))
    for way, payload in payloads.items():
        seen.ask(f"failure, {way}", Script(text="so far", fails=payload))
    seen.ask("what is left at the end", Script(text=latin("caf\x1b[") + "\xc3"))


def typed(seen: Watched, payloads: dict[str, str]) -> None:
    """Messages: pasted, sent, recalled; and commands that do not exist."""
    for way, payload in payloads.items():
        seen.told(f"pasted, {way}")
        harmless = payload.replace("\x1b[201~", "").replace("\r", "").replace("\n", " ")
        seen.place.says(Script(text="ok"))
        seen.face.exchange(seen.terminal, f"\x1b[200~{harmless} .\x1b[201~")
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
        file = folder / (f"f{place}" + name_of(payload))
        file.write_text(payload, "utf-8", errors="replace")
        if not set(name_of(payload)) & set("\r\n\x03\x04\x1b\x7f\t\b") and payload.isprintable():
            seen.command(f"/read {file}", f"file name, {way}")
    seen.ask("file in a text", Script(text="read"), f"what is in @{folder}/f0nothing")
    for line in (
        f"/system @{min(folder.iterdir())}", "/system", "/show prompt", "/show template", "/stats", "/sessions", "/n",
        "/tokens", "/set", "/export md", "/export json", "/copy", "/undo", "/resume ZQ", "/new", "/sessions",
    ):  # fmt: skip
        seen.watch.copies = line == "/copy"
        seen.command(line)


def corpus(home: Path, face: Line, report: Report, **environ: str) -> None:
    """Every way, with every payload."""
    place = Place(home / "corpus", name_of("model" + "".join(ACTING[way] for way in sorted(ACTING))[:60]))
    place.says(Script(notes=tuple(ACTING.values()), device_name=ACTING["title"] + "CPU" + ACTING["C1 CSI"]))
    with Watched(face, place, report, "--stats", **environ) as seen:
        try:
            seen.rest()
            for part in (replies, typed, commands):
                part(seen, ACTING)
            seen.leave()
        except Gave as error:
            report.wrong.append(f"{seen.where}: {error}")
    with Watched(face, place, report, "--resume", "1", **environ) as seen:  # what an earlier process has kept
        seen.rest()
        seen.command("/sessions")
        seen.leave()


def strings(home: Path, face: Line, report: Report, count: int, seed: int, **environ: str) -> None:
    """Random ones, in replies of `BATCH`."""
    rng = random.Random(seed)
    while report.strings < count and not report.wrong:
        place = Place(home / f"strings {report.strings}")
        with Watched(face, place, report, "--no-save", **environ) as seen:
            seen.rest()
            for batch in batches(rng, min(count - report.strings, 5 * BATCH)):
                seen.ask("random strings", Script(step=rng.choice((1, 7, 300)), text=latin("\n".join(batch) + END)))
                report.strings += len(batch)
                seen.command("/new")
            seen.leave()


def batches(rng: random.Random, count: int) -> Iterator[list[str]]:
    """`count` strings."""
    while count > 0:
        yield [f"{number} {random_text(rng)}" for number in range(min(count, BATCH))]
        count -= BATCH


def campaign(home: Path, face: Line, count: int, seed: int, canary: bool = False) -> Report:
    """The corpus, then `count` random strings."""
    report, environ = Report(), {"LOCALQ_TEST_UNSAFE": "1"} if canary else {}
    corpus(home, face, report, **environ)
    strings(home, face, report, count, seed, **environ)
    return report


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strings", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--face", choices=sorted(FACES), default="line")
    parser.add_argument("--canary", action="store_true", help="without the sanitizer")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        report = campaign(Path(home), FACES[arguments.face](), arguments.strings, arguments.seed, arguments.canary)
    for each in report.wrong[:100]:
        print(each, file=sys.stderr)
    print(json.dumps({"face": arguments.face, **vars(report), "wrong": len(report.wrong)}))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
