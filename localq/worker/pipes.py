"""The threads that read what the engine process says: events from its stdout, the log from its stderr."""

from __future__ import annotations

import collections
import queue
from typing import BinaryIO

from localq.errors import LocalqError
from localq.worker import messages
from localq.worker.messages import Event, Request

LOG_LINE_BYTES = 2000


def read_events(stdout: BinaryIO, events: queue.Queue[Event | LocalqError | None]) -> None:
    """Every event, in order; an error for what is none; None at the end."""
    with stdout:
        while line := stdout.readline(messages.MAX_LINE_BYTES):
            try:
                event = messages.decode(line)
            except LocalqError as error:
                events.put(error)
                continue
            if not isinstance(event, Request):
                events.put(event)
    events.put(None)


def read_log(stderr: BinaryIO, log: collections.deque[str]) -> None:
    """Every line, without its end."""
    with stderr:
        while line := stderr.readline(LOG_LINE_BYTES):
            log.append(line.decode("utf-8", "replace").rstrip())
