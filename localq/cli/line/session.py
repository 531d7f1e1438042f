"""What `chat` and `run` show on a terminal: a model that is opened, a reply that streams, and how Ctrl-C stops it."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType

from localq.chat import open_model
from localq.chat.open_model import Opened
from localq.chat.reply import MEASURED
from localq.chat.session import ChatSession, Piece, Reply
from localq.cli import progress
from localq.cli.line.reply_printer import Printer
from localq.cli.line.thinking_lines import Thoughts
from localq.cli.output import is_rich_terminal, note
from localq.errors import LocalqError
from localq.planner.prepare import OnProgress
from localq.planner.speed import roofline
from localq.stats import Stats
from localq.wording import human_bytes, stats_line
from localq.worker.messages import Event, Loaded, Loading


class TakenBack(KeyboardInterrupt):
    """A Ctrl-C right behind the Enter that sent a message; the input history has it."""


class Discarded(KeyboardInterrupt):
    """A Ctrl-C at a message that is being written: that is gone, and nothing else."""


class StatusLine:
    """One line on stderr that is drawn over while work goes on; silent unless stderr is a terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self._shown = 0
        self._active = is_rich_terminal(sys.stderr) and not quiet

    def show(self, text: str) -> None:
        """Draw `text` over what stood there."""
        if self._active:
            sys.stderr.write("\r" + text[:100].ljust(self._shown))
            sys.stderr.flush()
            self._shown = len(text[:100])

    def clear(self) -> None:
        """Leave an empty line."""
        if self._active and self._shown:
            sys.stderr.write("\r" + " " * self._shown + "\r")
            sys.stderr.flush()
            self._shown = 0

    def bytes(self, stage: str, done: int, total: int) -> None:
        """`stage` with its share in percent."""
        share = f" {done / total:4.0%} of {human_bytes(total)}" if total else ""
        self.show(f"{stage}{share}")

    def event(self, event: Event) -> None:
        """Progress of a load."""
        if isinstance(event, Loading):
            self.bytes(event.stage, event.done_bytes, event.total_bytes)


class TerminalWatcher:
    """Shows on stderr how a model is opened: a bar for what is fetched, a status line while it is loaded."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet, self.status = quiet, StatusLine(quiet)

    def say(self, text: str) -> None:
        """One line, on a line of its own."""
        self.status.clear()
        note(text)

    def fetching(self, name: str) -> AbstractContextManager[OnProgress]:
        """A bar."""
        return progress.fetch_bar(name, self.quiet)

    def loading(self, event: Event) -> None:
        """The stage and its share."""
        self.status.event(event)

    def load(self, opened: Opened) -> Loaded:
        """`opening.load_now`, shown here."""
        try:
            return open_model.load_now(opened, self)
        finally:
            self.status.clear()

    def __enter__(self) -> TerminalWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.status.clear()


def memory_line(loaded: Loaded) -> str:
    """What the model takes beside what was predicted: "[memory 17.9 GiB, predicted 17.8, +0.5 %]"; empty on the CPU."""
    measured, predicted = sum(loaded.ledger.values()), sum(loaded.predicted.values())
    if loaded.device != "cuda" or not predicted:
        return ""
    off = 100 * (measured - predicted) / predicted
    return f"[memory {measured / 2**30:.2f} GiB, predicted {predicted / 2**30:.2f} GiB, {off:+.1f} %]"


def speed_line(stats: Stats, loaded: Loaded | None) -> str:
    """The figures of a reply, on a GPU with its share of what the memory's bandwidth allows."""
    roof = roofline.of_loaded(loaded) if loaded is not None else None
    return stats_line(stats, roof.said(stats) if roof is not None else "")


@dataclass
class Pressed:
    """told: Ctrl-C was pressed."""

    told: bool = False


@contextlib.contextmanager
def interruptible(session: ChatSession) -> Iterator[Pressed]:
    """While a reply streams, Ctrl-C stops the reply instead of the program; yields whether it was pressed."""
    pressed = Pressed()
    presses: SimpleQueue[bool] = SimpleQueue()

    def wait() -> None:
        if presses.get():
            session.stop()

    def stop(signal_number: int, frame: FrameType | None) -> None:
        # What is interrupted here may hold any lock, that of a press just before too: none is taken.
        if pressed.told:
            raise KeyboardInterrupt  # twice: the reply does not matter any more
        presses.put(True)
        pressed.told = True

    threading.Thread(target=wait, daemon=True).start()
    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
        presses.put(False)


def print_reply(
    parts: Iterator[Piece | Reply], status: StatusLine, thoughts: Thoughts, printer: Printer
) -> Reply | None:
    """Stream the answer of a reply as it arrives; returns its end, or None when the stream had none. Where it fails,
    the line that was begun ends before the error is told."""
    reply = None
    try:
        for part in parts:
            if isinstance(part, Reply):
                reply = part
                continue
            _show_piece(part, status, thoughts, printer)
    except LocalqError:
        status.clear()
        thoughts.end()
        printer.cut()
        raise
    status.clear()
    thoughts.end()
    if reply is None or reply.reason != MEASURED:
        printer.end()
    return reply


def _show_piece(part: Piece, status: StatusLine, thoughts: Thoughts, printer: Printer) -> None:
    if part.notice:
        status.clear()
        printer.pause()
        note(f"({part.notice})")
    elif part.thinking:
        status.clear()
        printer.pause()
        thoughts.write(part.text)
    elif part.text:
        status.clear()
        thoughts.end()
        printer.write(part.text)
    elif part.stats.phase == "prefill" and part.stats.prompt_tokens:
        done = part.stats.cached_tokens + part.stats.prefilled_tokens
        status.show(f"reading the prompt {done / part.stats.prompt_tokens:4.0%}")
