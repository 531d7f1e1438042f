"""Work that Ctrl-C does not cut: native code, which is waited for only so long, and what has to come to its end."""

from __future__ import annotations

import collections
import os
import queue
import signal
import sysconfig
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from localq import places

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises. Raises TimeoutError where it takes longer; its thread is left behind then.

    Ctrl-C comes through at once. Only code that lets other threads run can be left.
    """
    answers: queue.SimpleQueue[tuple[bool, T | BaseException]] = queue.SimpleQueue()

    def worker() -> None:
        try:
            answers.put((True, work()))
        except BaseException as error:  # raised again by the caller
            answers.put((False, error))

    threading.Thread(target=worker, daemon=True).start()
    try:
        worked, answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if not worked:
        raise answer  # type: ignore[misc]
    return answer  # type: ignore[return-value]


def uncut(work: Callable[[], None]) -> None:
    """Do `work` to its end, and raise what it raises. Ctrl-C comes through at once; its thread goes on then, and the
    process does not exit before it."""
    failed: list[BaseException] = []

    def worker() -> None:
        try:
            work()
        except BaseException as error:  # raised again by the caller
            failed.append(error)

    thread = threading.Thread(target=worker, daemon=False)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def environment() -> dict[str, str]:
    """The front end's environment; a source tree that is not installed is made importable in spite of -P."""
    environment = dict(os.environ)
    root = places.PACKAGE_PARENT
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
