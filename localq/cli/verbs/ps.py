"""`localq ps`: the servers of this user and the models that they hold."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from localq.cli import options
from localq.cli.output import note, print_json, stdout_table
from localq.planner import making
from localq.wording import human_bytes

if TYPE_CHECKING:
    from localq.worker.messages import ServerStatus


def ps(json: options.Json = False) -> None:
    """List running servers and the models in memory.

    `localq run` and `localq chat` use these models instead of loading their own.
    """
    found = statuses()
    if json:
        print_json({"servers": [dataclasses.asdict(each) for each in found]})
    elif found:
        now = time.time()
        rows = [row(each, now) for each in found]
        stdout_table(["MODEL", "FORMAT", "STATE", "MEMORY", "CONTEXT", "URL", "PID"], rows, right=frozenset({3, 4, 6}))
    else:
        note("no server is running; start one with `localq serve MODEL`")


def statuses() -> list[ServerStatus]:
    """The status of each server of this user, in order of process ids, without those that do not answer."""
    from localq.errors import LocalqError
    from localq.worker import shared  # start-up cost: `localq --help` does without it

    found = []
    for engine in shared.servers():
        try:
            found.append(engine.status())
        except (LocalqError, OSError):  # it is ending
            continue
    return found


def row(status: ServerStatus, now: float) -> list[str]:
    """A line of the table. now: seconds since 1970."""
    memory = f"{human_bytes(status.bytes)} ({status.device})" if status.loaded else "-"
    context = f"{status.context_size:,}" if status.loaded else "-"
    return [status.model, status.format or "-", state(status, now), memory, context, status.url or "-", str(status.pid)]


def state(status: ServerStatus, now: float) -> str:
    """The state of a server in words. now: seconds since 1970."""
    if status.loading:
        return "loading"
    if status.busy:
        return f"answering, {status.queued} waiting" if status.queued else "answering"
    if not status.loaded:
        return "unloaded"
    if status.unloads_at is None:
        return "idle"
    left_s = max(0.0, status.unloads_at - now)
    return f"idle, unloads in {f'{left_s:.0f} s' if left_s < 60 else making.duration(left_s)}"
