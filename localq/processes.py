"""Work that Ctrl-C does not cut: native code, which is waited for only so long, and what has to come to its end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

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
