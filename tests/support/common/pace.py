"""How fast this machine is just now: limits in seconds of CPU time are those of a machine that has nothing else to do.

A shared processor with a busy neighbour takes half as long again for the same work, CPU time included.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable

# Starting Python with these takes a fifth of what the full screen takes to its first frame, which was 0.45 to 0.64 s
# where and when the limits were set.
STARTED = "import asyncio, dataclasses, decimal, email.mime.text, http.client, json, sqlite3, typing, unittest"
NOMINAL_S = 0.105
TRIES = 20


def within(limit_s: float, run: Callable[[], float]) -> bool:
    """Whether the quickest of up to 20 runs (`run` returns seconds of CPU time) is within the limit, at the pace that
    the quickest start of Python beside them had; a pace above the nominal one counts as that."""
    best = started = float("inf")
    for _ in range(TRIES):
        started, best = min(started, start_s()), min(best, run())
        if best < limit_s * max(1.0, started / NOMINAL_S):
            return True
    print(f"{best:.3f} s, where Python starts in {started:.3f} s (nominal {NOMINAL_S})")
    return False


def slowness() -> float:
    """How many times as long as it should this machine takes just now; 1 where it is not slow."""
    return max(1.0, min(start_s() for _ in range(3)) / NOMINAL_S)


def start_s() -> float:
    """CPU time, user and system, of starting Python with some of its library."""
    return children_s(lambda: subprocess.run([sys.executable, "-I", "-c", STARTED], check=True))


def children_s(work: Callable[[], object]) -> float:
    """CPU time, user and system, of the processes that `work` starts and waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
