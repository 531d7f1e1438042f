"""Output of `chat` and `run`: loading a model, streaming a reply, and Ctrl-C that stops it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType

from localq.chat import open_model
from localq.chat.open_model import OpenSession
from localq.chat.reply import MEASURED, CallEvent, Reply, ReplyPiece
from localq.chat.session import ChatSession
from localq.cli import agree, progress
from localq.cli.line.reply_printer import Printer
from localq.cli.line.thinking_lines import Thoughts
from localq.cli.output import is_rich_terminal, note, stderr
from localq.errors import LocalqError
from localq.planner.consent import OpenCost
from localq.sanitize import sanitize, unfiltered
from localq.stats import Stats
from localq.wording import OnProgress, human_bytes, stats_line
from localq.worker.messages import Event, Loaded, Loading


class SendCancelled(KeyboardInterrupt):
    """Ctrl-C right after Enter: the message is not sent and stays in the input history."""


class InputDiscarded(KeyboardInterrupt):
    """Ctrl-C while a message is typed: discards only that message."""


class ProgressLine:
    """One line on stderr that shows progress; silent unless stderr is a terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self._shown = 0
        self._active = is_rich_terminal(stderr()) and not quiet

    def show(self, text: str) -> None:
        """Replace the line by `text`."""
        if self._active:
            text = sanitize(text)[:100]
            _draw("\r" + text.ljust(self._shown))
            self._shown = len(text)

    def clear(self) -> None:
        """Erase the line."""
        if self._active and self._shown:
            _draw("\r" + " " * self._shown + "\r")
            self._shown = 0

    def bytes(self, stage: str, done: int, total: int) -> None:
        """Show `stage` with its percentage."""
        share = f" {done / total:4.0%} of {human_bytes(total)}" if total else ""
        self.show(f"{stage}{share}")

    def event(self, event: Event) -> None:
        """Show the progress of a load."""
        if isinstance(event, Loading):
            self.bytes(event.stage, event.done_bytes, event.total_bytes)


def _draw(text: str) -> None:
    terminal = unfiltered(stderr())
    terminal.write(text)
    terminal.flush()


class TerminalWatcher:
    """Shows on stderr how a model opens: a bar for downloads, a status line while it loads."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet, self.status = quiet, ProgressLine(quiet)

    def say(self, text: str) -> None:
        """Print one line below the status line."""
        self.status.clear()
        note(text)

    def agree(self, cost: OpenCost) -> bool:
        """Ask at the terminal; see `agree.ask`."""
        self.status.clear()
        return agree.ask([cost])

    def fetching(self, name: str) -> AbstractContextManager[OnProgress]:
        """A download bar."""
        return progress.fetch_bar(name, self.quiet)

    def loading(self, event: Event) -> None:
        """Show the stage and its percentage."""
        self.status.event(event)

    def load(self, opened: OpenSession) -> Loaded:
        """Load the model with progress (`open_model.load_now`)."""
        try:
            return open_model.load_now(opened, self)
        finally:
            self.status.clear()

    def report_tools(self, session: ChatSession, summary: bool) -> list[str]:
        """Lines about the tools of a session, whose servers may still be starting (`ChatSession.tool_report`)."""
        if session.tools.toolbox is not None:
            self.status.show("starting MCP servers")
        try:
            return session.tool_report(summary)
        finally:
            self.status.clear()

    def __enter__(self) -> TerminalWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.status.clear()


def memory_line(loaded: Loaded) -> str:
    """Measured and predicted memory: "[memory 17.9 GiB, predicted 17.8 GiB, +0.5 %]"; empty on the CPU."""
    measured, predicted = sum(loaded.ledger.values()), sum(loaded.predicted.values())
    if loaded.device != "cuda" or not predicted:
        return ""
    off = 100 * (measured - predicted) / predicted
    return f"[memory {measured / 2**30:.2f} GiB, predicted {predicted / 2**30:.2f} GiB, {off:+.1f} %]"


def stage_lines(loaded: Loaded, first_token_s: float) -> list[str]:
    """Seconds of each stage from the start of the engine process to the first token, a line each; the sum last."""
    stages = {**loaded.stages, "first token": first_token_s}
    rows = [*stages.items(), ("total start-up", sum(stages.values()))]
    return [f"[{seconds:6.2f} s  {stage}]" for stage, seconds in rows]


def speed_line(stats: Stats, loaded: Loaded | None) -> str:
    """The figures of a reply; on a GPU with its share of the bandwidth limit."""
    from localq.planner.speed import roofline  # start-up cost: only the end of a reply needs it

    roof = roofline.model_roof(loaded) if loaded is not None else None
    return stats_line(stats, roof.text(stats) if roof is not None else "")


@dataclass
class Interruption:
    """Flag set by Ctrl-C during a reply."""

    is_requested: bool = False


@contextlib.contextmanager
def stop_on_interrupt(session: ChatSession) -> Iterator[Interruption]:
    """Let Ctrl-C stop the streaming reply instead of the program."""
    interruption = Interruption()
    presses: SimpleQueue[bool] = SimpleQueue()

    def wait() -> None:
        if presses.get():
            session.stop()

    def stop(signal_number: int, frame: FrameType | None) -> None:
        # The interrupted code may hold any lock, so none is taken here.
        if interruption.is_requested:
            raise KeyboardInterrupt  # a second press quits
        presses.put(True)
        interruption.is_requested = True

    threading.Thread(target=wait, daemon=True).start()
    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, previous)
        presses.put(False)


def print_reply(
    parts: Iterator[ReplyPiece | Reply], status: ProgressLine, thoughts: Thoughts, printer: Printer
) -> Reply | None:
    """Print a reply as it streams; returns its end, if any. A failure ends an open line first."""
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


def _show_piece(part: ReplyPiece, status: ProgressLine, thoughts: Thoughts, printer: Printer) -> None:
    if part.notice:
        status.clear()
        printer.pause()
        note(f"({part.notice})")
    elif part.event is not None:
        status.clear()
        thoughts.end()
        printer.cut()
        _show_call(part.event, status)
    elif part.thinking:
        status.clear()
        printer.pause()
        thoughts.write(part.text)
    elif part.text:
        status.clear()
        thoughts.end()
        printer.write(part.text)
    elif part.stats.phase == "prefill" and part.stats.prompt_tokens:
        if part.stats.generated_tokens:  # the conversation is computed again, in the middle of the reply
            printer.pause()
        done = part.stats.cached_tokens + part.stats.prefilled_tokens
        status.show(f"processing the prompt {done / part.stats.prompt_tokens:4.0%}")


def _show_call(event: CallEvent, status: ProgressLine) -> None:
    """A line for a call that begins, unless the question about it shows it, and one for its end."""
    if event.outcome:
        note(f"({event.tool}{' failed' if event.failed else ''}: {event.outcome})")
    elif not event.asks:
        note(f"(calling {event.line})")
        status.show(f"waiting for {event.tool}")
