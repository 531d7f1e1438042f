"""Readers of the engine process's pipes, each run in a thread: events from stdout, the log from stderr."""

from __future__ import annotations

import collections
import queue
from typing import BinaryIO

from localq.errors import LocalqError
from localq.worker import messages
from localq.worker.messages import Event, Request

LOG_LINE_BYTES = 2000


def read_events(stdout: BinaryIO, events: queue.Queue[Event | LocalqError | None]) -> None:
    """Put every event into `events`, in order: an error for a malformed line, None at the end."""
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
    """Append every line to `log`, without its newline."""
    with stderr:
        while line := stderr.readline(LOG_LINE_BYTES):
            log.append(line.decode("utf-8", "replace").rstrip())
