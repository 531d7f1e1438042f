"""What a process of localq's own is started with, and what is to be said of one that has ended. Torch-free."""

from __future__ import annotations

import collections
import os
import signal
import sysconfig
from collections.abc import Sequence
from pathlib import Path


def environment() -> dict[str, str]:
    """The front end's environment; a source tree that is not installed is made importable in spite of -P."""
    environment = dict(os.environ)
    root = Path(__file__).resolve().parents[2]
    if root != Path(sysconfig.get_path("purelib")).resolve() and root != Path(sysconfig.get_path("platlib")).resolve():
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{inherited}" if inherited else str(root)
    return environment


def ending(code: int) -> str:
    """A process's return code in words: "exit code 1", "signal SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def last_words(log: Sequence[str] | collections.deque[str]) -> str:
    """The last line of a log that means something: not blank, not the inside of a traceback."""
    lines = [line.strip() for line in log if line.strip() and not line.startswith((" ", "\t"))]
    return lines[-1] if lines else ""
