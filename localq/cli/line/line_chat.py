"""The line chat: reads a message or a command, prints the reply as it streams, until the user leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from localq.chat import commands, open_conversation, open_model
from localq.chat.commands.models import SwitchModel
from localq.chat.commands.sessions import taken_up
from localq.chat.open_conversation import Start
from localq.chat.open_model import Opened, Wanted
from localq.chat.reply import MEASURED, Reply, check_whole
from localq.cli.line.command_host import TerminalHost
from localq.cli.line.interrupts import Presses
from localq.cli.line.line_input import Reader
from localq.cli.line.reply_printer import printing, tell
from localq.cli.line.session import (
    Discarded,
    TakenBack,
    TerminalWatcher,
    interruptible,
    memory_line,
    print_reply,
    speed_line,
)
from localq.cli.line.thinking_lines import shown
from localq.cli.options import Given
from localq.cli.output import note, tell_lost
from localq.errors import ExitCode, LocalqError
from localq.settings import Settings

if TYPE_CHECKING:
    from localq.chat.session import ChatSession, Replies

LEAVE_WITHIN_S = 2.0  # a second Ctrl-C at the empty prompt within this time leaves


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a chat stands: what to open, and what the session begins with. attached: texts before the next message."""

    settings: Settings
    wanted: Wanted
    start: Start
    attached: tuple[str, ...] = ()

    def switched(self, wish: SwitchModel, session: ChatSession) -> _Place:
        """With another model: the conversation and its settings go on, the sampling is that model's own."""
        said = dataclasses.replace(
            self.settings, model=wish.name, system=session.system, max_tokens=session.max_tokens, think=session.think
        )
        return dataclasses.replace(self.of(session), settings=said, wanted=Wanted(wish.format, self.wanted.force))

    def of(self, session: ChatSession) -> _Place:
        """The same model, where `session` is now."""
        start = dataclasses.replace(
            self.start, record=session.record, store=session.store, stop=session.stop_strings, grammar=session.grammar
        )
        return dataclasses.replace(self, start=start, attached=tuple(session.attached))


def converse(
    settings: Settings, start: Start, quiet: bool, wanted: Wanted | None = None, first: Given | None = None
) -> int:
    """Open the model and read messages until the user leaves. first: a message to begin with; where stdin is no
    terminal, it is the only one, and what fails ends with its exit code."""
    place, back = _Place(settings, wanted or Wanted(), start), None
    while True:
        try:
            outcome = _talk(place, quiet, first, again=back is not None)
        except LocalqError as error:
            if back is None:
                raise
            note(f"localq: {error}")
            note(f"going on with {back.settings.model}")
            place, back = back, None
            continue
        if isinstance(outcome, int):
            return outcome
        wish, session, first = *outcome, None
        place, back = place.switched(wish, session), place.of(session)


def _talk(place: _Place, quiet: bool, first: Given | None, again: bool) -> int | tuple[SwitchModel, ChatSession]:
    """With one model; returns the exit code, or the wish for another. again: the conversation was on the screen."""
    watcher, settings = TerminalWatcher(quiet), place.settings
    with watcher, open_model.open_session(settings.model, settings, watcher, place.wanted) as opened:
        open_model.check_converses(opened, settings.model)
        loaded = watcher.load(opened)
        if settings.stats and not quiet and (line := memory_line(loaded)):
            note(line)
        at_terminal = sys.stdin.isatty() and not quiet
        if at_terminal:
            note(
                f"{loaded.name} ({loaded.format}) on {loaded.device_name}, context {loaded.context_size}. /help, Ctrl-D"
            )
        record = place.start.take_up(opened.session)
        opened.session.attached += place.attached
        if record is not None and not quiet and not again:
            tell(taken_up(record), settings.markdown and place.start.grammar is None)
        try:
            outcome = LineChat(opened, watcher, settings.stats and not quiet, settings.markdown).run(first)
        finally:  # a signal leaves too
            saved = open_conversation.saved_at_last(opened.session, note)
        record = opened.session.record
        if isinstance(outcome, SwitchModel):
            _leave(opened, watcher, settings.stats and not quiet)
            return outcome, opened.session
        if at_terminal and saved and opened.session.store is not None and record.id is not None:
            note(f"kept as {record.id}: `localq chat --resume {record.id}` or `localq chat --continue` goes on")
        _leave(opened, watcher, settings.stats and not quiet)
        return outcome


def _leave(opened: Opened, watcher: TerminalWatcher, show_stats: bool) -> None:
    """Keep what the model has read, for the next time; Ctrl-C leaves without it."""
    watcher.status.show("keeping what the model has read")
    with contextlib.suppress(KeyboardInterrupt):
        opened.session.leave()
    watcher.status.clear()
    keeper = opened.session.keeper
    if show_stats and keeper is not None and (why := keeper.told()):
        note(f"[{why}]")


class LineChat:
    """Read a line, do what it says, until the end of input. `interrupted`: the last reply was stopped by Ctrl-C."""

    def __init__(self, opened: Opened, watcher: TerminalWatcher, show_stats: bool, markdown: bool = True) -> None:
        self.opened, self.session, self.watcher, self.show_stats = opened, opened.session, watcher, show_stats
        self.presses = Presses()
        self.read = Reader(self.session.store is not None, self.presses)
        self.host = TerminalHost(self.read.aside, markdown)
        self.interrupted_at = -LEAVE_WITHIN_S
        self.interrupted = False

    def run(self, first: Given | None = None) -> int | SwitchModel:
        """Until the user leaves (an exit code) or wants another model. first: as for `converse`."""
        if first is not None and not sys.stdin.isatty():
            reply = self.ask(first.words, first.piped)
            if reply is not None:
                check_whole(reply)
            return ExitCode.INTERRUPTED if self.interrupted else ExitCode.OK
        # Where nobody is at a terminal, a Ctrl-C ends the program wherever it falls.
        with self.presses.heard() if sys.stdin.isatty() else contextlib.nullcontext(), self.read:
            if first is not None:
                with self._told():
                    self.ask(first.words, first.piped)
            while True:
                outcome = self.turn()
                if outcome is not None:
                    return outcome

    def turn(self) -> int | SwitchModel | None:
        """Read one message or command and act on it; None means go on."""
        since, self.interrupted_at = self.interrupted_at, -LEAVE_WITHIN_S  # only two in a row are two
        try:
            line = self.read()
        except EOFError:
            return ExitCode.OK
        except TakenBack:
            note("(stopped)")
            return None
        except Discarded:
            return None
        except KeyboardInterrupt:
            if time.monotonic() - since < LEAVE_WITHIN_S or not sys.stdin.isatty():
                return ExitCode.INTERRUPTED
            self.interrupted_at = time.monotonic()
            note("Ctrl-C again or Ctrl-D leaves")
            return None
        outcome = None
        with self._told():
            outcome = self.handle(line)
        return outcome

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """An expected failure is told, and the conversation goes on; a closed pipe or Ctrl-C ends it."""
        try:
            yield
        except LocalqError as error:
            self.watcher.status.clear()
            note(f"localq: {error}")

    def handle(self, line: str) -> int | SwitchModel | None:
        """Act on one message or command; None means go on."""
        if not line.strip():
            return None
        if not line.startswith("/") or line.startswith("//"):
            self.ask(line.removeprefix("/"))
            return None
        name, argument = commands.parse(line.strip())
        if name == "/exit":
            return ExitCode.OK
        said = self.session.messages[-1].answer if name == "/continue" and self.session.messages else ""
        try:
            with self.presses.raised():
                result = commands.COMMANDS[name](self.session, argument, self.host)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            note("(stopped)")
            return None
        if isinstance(result, SwitchModel):
            return result
        if isinstance(result, str):
            tell(result, self._draws())
        else:
            self.stream(result, said)
        return None

    def ask(self, text: str, piped: str = "") -> Reply | None:
        """Send a message, with the files that it names, behind what was piped in, which names none; what came."""
        try:
            with self.presses.raised():
                told, parts = commands.asked(self.session, text, piped)
            for line in told:
                note(f"({line})")
        except KeyboardInterrupt:  # before there is a reply to stop
            if not sys.stdin.isatty():
                raise
            note("(stopped)")
            return None
        return self.stream(parts)

    def _draws(self) -> bool:
        """As Markdown; what keeps to a grammar is none."""
        return self.host.markdown and self.session.grammar is None

    def stream(self, parts: Replies, said: str = "") -> Reply | None:
        """Print a reply, or what comes behind `said`, as it arrives; Ctrl-C stops it and keeps it. Returns its end."""
        with shown(self.watcher.quiet) as thoughts, interruptible(self.session) as pressed, contextlib.closing(parts):
            if self.presses.taken():  # behind what was asked for and before this
                pressed.told = True
                self.session.stop()
            self.watcher.load(self.opened)
            with printing(self._draws(), said) as printer:
                reply = print_reply(parts, self.watcher.status, thoughts, printer)  # closed: what came of it is kept
        self.interrupted = pressed.told
        if reply is not None:
            for line in reply.notices:
                note(f"({line})")
            if self.show_stats and reply.reason != MEASURED:
                note(speed_line(reply.stats, self.session.loaded))
                if self.session.keeper is not None and (why := self.session.keeper.told()):
                    note(f"[{why}]")
        tell_lost()
        return reply
