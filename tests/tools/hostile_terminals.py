"""Hostile runs, kind `terminal`: keys, pastes, sizes, signals and foreign texts at a pseudo terminal."""

from __future__ import annotations

import random
import signal

from localq.chat.history.conversation import Message
from localq.chat.history.record import Record
from localq.chat.history.store import ConversationStore
from tests.support.chat.every_command import STEPS
from tests.tools import hostile_draws as draws
from tests.tools.hostile_process import Plan
from tests.tools.hostile_scratch import Scratch

COMMANDS = tuple(line for line, _ in STEPS if line.startswith("/") and "export" not in line)
KEYS = (
    "\r", "\x1b", "\t", "\x7f", "\x1b[A", "\x1b[B", "\x1b[5~", "\x1b[6~", "\x1bOP", "\x1bOQ", "\x1bOR", "\x1bOS",
    "\x1b[15~",
    "\x1b[17~", "\x1b[18~", "\x02", "\x10", "\x13", "\x0f", "\x14", "\x01", "\x05", "\x0b", "\x15", "\x17", "\x19",
    "\x0c",
    "\x12", "\x1b[200~", "\x1b[201~", "\x1b[<0;5;5M\x1b[<0;5;5m", "\x1b[<64;10;10M", "\x1b[1;5C", "\x1b[13;2u",
    "\x1b[I", "\x1b[O", "\x1b]11;rgb:0000/0000/0000\x07", "\x1b[?1;2c", "\x1bP>|x\x1b\\", "\x1b[8;1;1t",
    "\x1b[999;999R",
)  # fmt: skip
SIZES = ((1, 1), (2, 1), (20, 3), (40, 8), (80, 24), (300, 100), (10, 200))
TERMS = ("xterm-256color", "xterm-256color", "dumb", "linux", "vt100", "screen", "", "no-such-terminal", "xterm-kitty")


def plan(rng: random.Random, scratch: Scratch) -> Plan:
    """A program at a terminal, and what it is given there."""
    name = rng.choice(("model", draws.name(rng)[:60]))
    model = str(draws.sound_model(scratch.work / (name if name not in ("notes.txt", "link", "loop") else "model")))
    draws.says(scratch, rng)
    if rng.random() < 0.4:
        _converse(rng, scratch)
    argv, scripted = _command(rng, model)
    if argv[:1] == ["config"]:
        scratch.allow(scratch.config)
    # Else keys drawn by lot make less write files and run commands.
    environment: dict[str, str | None] = {"TERM": rng.choice(TERMS), "LESSSECURE": "1"}
    if rng.random() < 0.2:
        environment["PAGER"] = rng.choice(("less", "cat", "true", "false", "no-such-program", "head -1", "", "'"))
    keys = [_key(rng, scratch) for _ in range(rng.randint(0, 8))]
    if rng.random() < 0.15:
        keys.insert(rng.randint(0, len(keys)), rng.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
    trap = f"terminal {environment['TERM']!r}, {len(keys)} keys"
    keys = [each.replace("\x1c", "").replace("\x1a", "") if isinstance(each, str) else each for each in keys]
    return Plan(argv, trap, environment, keys=keys, size=rng.choice(SIZES), scripted=scripted, may_tell=True)


def _command(rng: random.Random, model: str) -> tuple[list[str], bool]:
    """And whether the scripted engine answers."""
    return rng.choice((
        (["chat", model], True), (["chat", model], True), (["chat", model, "--plain"], True), (["tui", model], True),
        (["chat", model, "--plain", "--continue"], True), (["chat", model, "--continue"], True), (["run", model,
        "hi"], True),
        (["run", model], True), (["chat", model, "--resume"], True), (["tui"], True), ([], True), (["ls"], False),
        (["fit", "--vram", "24", "--all"], False), (["config", "edit"], False), (["prune"], False), (["doctor"], False),
        (["rm", "stranger/model"], False), (["config", "show"], False), (["help"], False), (["pull", "smollm2-135m"],
        False),
        (["chat", model, "--token", "-"], True), (["config", "set", "system", draws.argument(rng)], False),
    ))  # fmt: skip


def _key(rng: random.Random, scratch: Scratch) -> str | bytes | tuple[int, int]:
    chance = rng.random()
    if chance < 0.3:
        return rng.choice(KEYS)
    if chance < 0.5:
        return rng.choice(COMMANDS) + "\r"
    if chance < 0.6:
        return f"hello {draws.argument(rng)[:300]}\r".replace("\n", " ")
    if chance < 0.75:
        return f"\x1b[200~{draws.text(rng)}\x1b[201~\r"
    if chance < 0.85:
        return rng.choice(SIZES)
    if chance < 0.92:
        # The kernel takes these two for signals of the user's own.
        return rng.randbytes(rng.randint(1, 60)).replace(b"\x1c", b"").replace(b"\x1a", b"")
    path = scratch.work / "notes.txt"
    return rng.choice((f"/export md {path}\r", f"/read {path}\r", f"say @{scratch.work / 'loop'}\r", "/export md\r",
                       f"/system @{draws.argument(rng)[:200]}\r".replace("\n", " "), "/fit\r",
                       "/model x/y\r"))  # fmt: skip


def _converse(rng: random.Random, scratch: Scratch) -> None:
    """Conversations that an older program may have kept: nothing is taken out of them."""
    record = Record(model=draws.text(rng), title=draws.text(rng))
    record.conversation.system = draws.text(rng).encode("utf-8", "replace").decode()
    for role in ("user", "assistant") * 2:
        said = draws.text(rng).encode("utf-8", "replace").decode()
        record.conversation.add(Message(role, said), record.conversation.head)
    record.title, record.model = (each.encode("utf-8", "replace").decode() for each in (record.title, record.model))
    ConversationStore(scratch.data / "sessions.db").save(record)
