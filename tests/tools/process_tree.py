"""The processes below another one, and what /proc says of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def family(leader: int) -> Iterator[int]:
    """The processes of the session that `leader` began, and those below it that began one of their own."""
    parents: dict[int, int] = {}
    sessions: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := fields_of(int(name))):
            parents[int(name)], sessions[int(name)] = int(fields[1]), int(fields[3])
    for process in parents:
        above = process
        while above not in (0, 1, leader):
            above = parents.get(above, 0)
        if above == leader or sessions[process] == leader:
            yield process


def descendants(leader: int) -> Iterator[int]:
    """`leader` and the processes below it, without a look at all others: what is looked up often."""
    yield leader
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{leader}/task"):
            for child in Path(f"/proc/{leader}/task/{thread}/children").read_text().split():
                yield from descendants(int(child))


def fields_of(process: int, thread: str = "") -> list[str]:
    """Fields of /proc/PID/stat behind the name: state, parent, group, session, ..."""
    path = f"/proc/{process}/task/{thread}/stat" if thread else f"/proc/{process}/stat"
    try:
        with open(path, "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii", "replace").split()
    except OSError:
        return []


def states_of(process: int) -> Iterator[str]:
    """The state of each thread: R, S, D, T, Z."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            yield (fields_of(process, thread) or ["Z"])[0]
