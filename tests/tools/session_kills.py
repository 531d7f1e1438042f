"""Kills processes while they save conversations, again and again, and looks at what is left each time.

    python -m tests.tools.session_kills --kills 2000 --seed 7

A process saves a conversation turn by turn and tells of each turn that is saved. It is killed with SIGKILL a seeded
number of turns and of microseconds after its start; at the nth instruction of SQLite's machine; or by the kernel in the
middle of the write that would make a file larger than a seeded size (SIGXFSZ), the database or its journal. Then the
file must be sound, and hold all turns that were told of, and at most the one besides that was being saved. The last
line is one JSON object; the exit status is 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from localq.chat.history import store as conversation_store
from localq.chat.history.conversation import Message
from localq.chat.history.record import Record
from localq.chat.history.store import ConversationStore

WAYS = ("time", "instruction", "size")
TURNS_A_LIFE = 12


@dataclass
class Report:
    """What was seen. `wrong`: states that are neither the one before nor the one after a save."""

    kills: int = 0
    lives: Counter[str] = field(default_factory=Counter)  # by the way of the kill, and how far it let the process come
    in_flight: int = 0  # kills after which the turn that nobody had been told of was there
    wrong: list[str] = field(default_factory=list)


def said(turn: int) -> str:
    """The content of a turn, by its number: of all sizes, so that pages overflow and the file grows."""
    return f"turn {turn} " + "x" * (turn * 997 % 9000)


def add_turn(session: Record) -> None:
    """The next turn of the conversation that is saved again and again."""
    count = len(session.conversation.turns)
    role = "assistant" if count % 2 else "user"
    session.conversation.add(Message(role, said(count)), session.conversation.head)


def die_at_instruction(count: int) -> None:
    """SIGKILL to this process at the count-th instruction that SQLite executes from now on."""
    connect, left = sqlite3.connect, [count]

    def counted() -> int:
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def connected(*arguments: object, **options: object) -> sqlite3.Connection:
        database = connect(*arguments, **options)
        database.set_progress_handler(counted, 1)
        return database

    conversation_store.sqlite3.connect = connected


def die_at_size(size: int) -> None:
    """The kernel ends this process in the write that would make a file larger than `size` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def live(store: ConversationStore, tell: int) -> None:
    """Save turn after turn and tell of each; what the process that is to be killed does."""
    session = store.load(1) if store.summaries() else Record()
    for _ in range(TURNS_A_LIFE):
        add_turn(session)
        store.save(session)
        os.write(tell, b".")


def told_before_death(store: ConversationStore, prepare: Callable[[], None], moment: tuple[int, float] | None) -> int:
    """How many turns a process told of before it died: so many turns and seconds later, or of what `prepare` set up."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            prepare()
            live(store, writer)
        finally:
            os._exit(0)
    os.close(writer)
    told = 0
    if moment is not None:
        turns, seconds = moment
        while told < turns:  # of what a process does, not of how fast the machine is
            told += len(os.read(reader, 1))
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told += len(os.read(reader, 4096))
    os.close(reader)
    return told


def killed(store: ConversationStore, rng: random.Random, way: str, before: int) -> int:
    """One life; the number of turns that it told of. before: bytes of the file."""
    if way == "time":
        return told_before_death(store, lambda: None, (rng.randint(0, 3), rng.uniform(0.0, 0.02)))
    if way == "instruction":
        count = rng.randint(1, 4000)
        return told_before_death(store, lambda: die_at_instruction(count), None)
    size = rng.choice([rng.randint(0, 40_000), before + rng.randint(0, 60_000)])
    return told_before_death(store, lambda: die_at_size(size), None)


def look(store: ConversationStore, least: int, report: Report) -> int:
    """The number of turns there are; what is wrong with them goes to the report."""
    with sqlite3.connect(store.path) as database:
        ((sound,),) = database.execute("PRAGMA integrity_check").fetchall()
    database.close()
    turns = store.load(1).conversation.turns if store.summaries() else []
    if sound != "ok":
        report.wrong.append(f"integrity_check: {sound}")
    if not least <= len(turns) <= least + 1:
        report.wrong.append(f"{len(turns)} turns, {least} were saved")
    if any(turn.message.content != said(number) for number, turn in enumerate(turns)):
        report.wrong.append("a turn has other content")
    report.in_flight += len(turns) - least
    return len(turns)


def campaign(folder: Path, kills: int, seed: int) -> Report:
    """`kills` processes, one after the other, on files in `folder`; every so often a new one begins."""
    rng, report, turns, file = random.Random(seed), Report(), 0, 0
    store = ConversationStore(folder / "0.db")
    while report.kills < kills:
        way = WAYS[report.kills % len(WAYS)]
        before = store.path.stat().st_size if store.path.exists() else 0
        told = killed(store, rng, way, before)
        report.kills += 1
        report.lives[f"{way}, {'some' if told else 'no'} turns saved"] += 1
        turns = look(store, turns + told, report)
        if turns > 150 or report.wrong:
            file, turns = file + 1, 0
            store = ConversationStore(folder / f"{file}.db")
        if len(report.wrong) > 10:
            break
    return report


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = campaign(Path(folder), arguments.kills, arguments.seed)
    print(json.dumps({**vars(report), "lives": dict(sorted(report.lives.items()))}))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
