"""A limit to how long native code is waited for, which cannot be interrupted."""

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
