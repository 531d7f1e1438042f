"""The line chat: reads messages and commands and prints replies until the user quits."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from localq.chat import commands, open_conversation, open_model
from localq.chat.attachments import Attachment
from localq.chat.commands.models import SwitchModel
from localq.chat.commands.sessions import recap
from localq.chat.open_conversation import Start
from localq.chat.open_model import OpenSession
from localq.chat.open_options import OpenOptions
from localq.chat.reply import MEASURED, Reply, check_complete
from localq.chat.terminal import error_log
from localq.cli.line.call_question import ask_at_terminal
from localq.cli.line.command_host import TerminalHost
from localq.cli.line.garbage import collect_between
from localq.cli.line.interrupts import Interrupts
from localq.cli.line.line_input import Reader
from localq.cli.line.reply_printer import open_printer, print_message
from localq.cli.line.session import (
    InputDiscarded,
    SendCancelled,
    TerminalWatcher,
    memory_line,
    print_reply,
    speed_line,
    stop_on_interrupt,
)
from localq.cli.line.thinking_lines import open_thoughts
from localq.cli.options import PromptText
from localq.cli.output import note, note_lost_characters, stderr
from localq.cli.piped_input import has_instructions
from localq.errors import ExitCode, LocalqError
from localq.settings import Settings

if TYPE_CHECKING:
    from localq.chat.reply import Replies
    from localq.chat.session import ChatSession
    from localq.chat.tools.permissions import Question

LEAVE_WITHIN_S = 2.0  # a second Ctrl-C on an empty prompt within this time quits


@dataclasses.dataclass(frozen=True)
class _ChatStart:
    """The model to open and the state to start from.

    attached   files that precede the next message
    scripted   as for `converse`
    """

    settings: Settings
    wanted: OpenOptions
    start: Start
    scripted: bool = False
    attached: tuple[Attachment, ...] = ()

    def with_model(self, wish: SwitchModel, session: ChatSession) -> _ChatStart:
        """This state with another model; conversation and settings stay, sampling is reset to its defaults."""
        settings = dataclasses.replace(
            self.settings, model=wish.name, system=session.system, max_tokens=session.max_tokens, think=session.think,
            think_budget=session.think_budget, preserve_thinking=session.preserve_thinking,
            draft=wish.draft or session.draft, draft_max=session.draft_max,
        )  # fmt: skip
        place = self.of(session)
        start = dataclasses.replace(place.start, origins=open_conversation.without_model(session.origins))
        wanted = OpenOptions(wish.format, self.wanted.force, fresh=self.wanted.fresh)
        return dataclasses.replace(place, settings=settings, start=start, wanted=wanted)

    def of(self, session: ChatSession) -> _ChatStart:
        """The same model, at the current state of `session`."""
        start = dataclasses.replace(
            self.start, record=session.record, store=session.store, stop=session.stop_strings, grammar=session.grammar,
            origins=session.origins, unsaved=tuple(session.unsaved),
        )  # fmt: skip
        return dataclasses.replace(self, start=start, attached=tuple(session.attached))


def converse(
    settings: Settings, start: Start, quiet: bool, wanted: OpenOptions | None = None, first: PromptText | None = None,
    scripted: bool = False,
) -> int:  # fmt: skip
    """Open the model and read messages until the user quits; returns the exit code.

    first      the first message; without a terminal at stdin it is the only one, and a failure is raised
    scripted   /commands and @files count in piped lines too: the user says that the lines are their own
    """
    place, back = _ChatStart(settings, wanted or OpenOptions(), start, scripted), None
    while True:
        try:
            outcome = _talk(place, quiet, first, again=back is not None)
        except LocalqError as error:
            if back is None:
                raise
            note(f"localq: {error}")
            note(f"continuing with {back.settings.model}")
            place, back = back, None
            continue
        if isinstance(outcome, int):
            return outcome
        wish, session, first = *outcome, None
        place, back = place.with_model(wish, session), place.of(session)


def _talk(
    place: _ChatStart, quiet: bool, first: PromptText | None, again: bool
) -> int | tuple[SwitchModel, ChatSession]:
    """Chat with one model; returns the exit code or a switch to another.

    again   the conversation is on the screen already
    """
    watcher, settings = TerminalWatcher(quiet), place.settings
    with watcher, open_model.open_session(settings.model, settings, watcher, place.wanted) as opened:
        open_model.check_chat_template(opened, settings.model)
        loaded = watcher.load(opened)
        if settings.stats and not quiet and (line := memory_line(loaded)):
            note(line)
        at_terminal = sys.stdin.isatty() and not quiet
        if at_terminal:
            note(
                f"{loaded.name} ({loaded.format}) on {loaded.device_name}, context {loaded.context_size}. "
                "Type /help for help; press Ctrl-D to quit."
            )
        record = place.start.attach(opened.session)
        opened.session.attached += place.attached
        for line in watcher.report_tools(opened.session, at_terminal):
            note(f"({line})")
        if record is not None and not quiet and not again:
            print_message(recap(record), settings.markdown and place.start.grammar is None)
        try:
            outcome = LineChat(
                opened, watcher, settings.stats and not quiet, settings.markdown, scripted=place.scripted
            ).run(first)
        finally:  # also after a signal
            lost = open_conversation.save_at_exit(opened.session, note)
        record = opened.session.record
        if isinstance(outcome, SwitchModel):
            _leave(opened, watcher, settings.stats and not quiet)
            return outcome, opened.session
        if at_terminal and lost is None and opened.session.store is not None and record.id is not None:
            note(f"Saved as conversation {record.id}. To resume it, run `localq chat --resume {record.id}`.")
        _leave(opened, watcher, settings.stats and not quiet)
        return lost.exit_code if lost is not None and outcome == ExitCode.OK else outcome


def _leave(opened: OpenSession, watcher: TerminalWatcher, show_stats: bool) -> None:
    """Save the KV cache for the next time; Ctrl-C skips that."""
    watcher.status.show("saving the KV cache")
    with contextlib.suppress(KeyboardInterrupt):
        opened.session.save_snapshot()
    watcher.status.clear()
    keeper = opened.session.keeper
    if show_stats and keeper is not None and (why := keeper.take_notice()):
        note(f"[{why}]")


class LineChat:
    """Read lines and act on them until the end of input. `interrupted`: Ctrl-C stopped the last reply."""

    def __init__(
        self, opened: OpenSession, watcher: TerminalWatcher, show_stats: bool, markdown: bool = True,
        scripted: bool = False,
    ) -> None:  # fmt: skip
        self.opened, self.session, self.watcher, self.show_stats = opened, opened.session, watcher, show_stats
        self.interrupts = Interrupts()
        self.read = Reader(self.session.store is not None, self.interrupts)
        self.host = TerminalHost(self.read.aside, markdown)
        self.interrupted_at = -LEAVE_WITHIN_S
        self.interrupted = False
        self.scripted = scripted
        self.says_plain = True  # that piped text gives no commands: once
        if (toolbox := self.session.tools.toolbox) is not None:
            asks = sys.stdin.isatty() and stderr().isatty() and not watcher.quiet  # else there is nobody to ask
            toolbox.asker = self._ask_about_call if asks else None

    def _ask_about_call(self, question: Question) -> None:
        self.watcher.status.clear()
        ask_at_terminal(question, self.read.aside)

    @property
    def takes_commands(self) -> bool:
        """True if /commands and @files are recognized in input lines."""
        return self.scripted or sys.stdin.isatty()

    def run(self, first: PromptText | None = None) -> int | SwitchModel:
        """Chat until the user quits (an exit code) or switches the model. first: as for `converse`."""
        if first is not None and not sys.stdin.isatty():
            self.opened.answer_once()
            reply = self.ask(first.words, first.piped)
            if reply is not None:
                check_complete(reply)
            return ExitCode.INTERRUPTED if self.interrupted else ExitCode.OK
        self.session.in_chat = self.takes_commands  # else no notice names a command
        # Without a terminal, Ctrl-C ends the program at any point.
        listens = self.interrupts.listen() if sys.stdin.isatty() else contextlib.nullcontext()
        with listens, self.read, collect_between() as collect:
            if first is not None:
                with self._report_errors():
                    self.ask(first.words, first.piped)
            while True:
                outcome = self.turn()
                if outcome is not None:
                    return outcome
                if self.session.last is not None:
                    collect()

    def turn(self) -> int | SwitchModel | None:
        """Read one message or command and act on it; None continues the chat."""
        since, self.interrupted_at = self.interrupted_at, -LEAVE_WITHIN_S  # presses count in a row only
        try:
            line = self.read()
        except EOFError:
            return ExitCode.OK
        except SendCancelled:
            note("(stopped)")
            return None
        except InputDiscarded:
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                return ExitCode.INTERRUPTED
            if time.monotonic() - since < LEAVE_WITHIN_S:
                return ExitCode.OK  # a way to quit: nothing is interrupted
            self.interrupted_at = time.monotonic()
            note("Press Ctrl-C again or Ctrl-D to quit")
            return None
        outcome = None
        with self._report_errors():
            if self.takes_commands:
                outcome = self.handle(line)
            else:
                self.send_piped(line)
        return outcome

    def send_piped(self, line: str) -> None:
        """Send a line from a pipe as it is: what is piped may be a stranger's, so it gives no commands."""
        if not line.strip():
            return
        if self.says_plain and has_instructions(line):
            note("(piped lines are sent as plain text; /commands and @files need a terminal or --plain)")
            self.says_plain = False
        self._send(lambda: ((), self.session.ask(line)))

    @contextlib.contextmanager
    def _report_errors(self) -> Iterator[None]:
        """Print a failure and continue; a closed pipe or Ctrl-C ends the chat, and a bug does without a terminal."""
        try:
            yield
        except LocalqError as error:
            self.watcher.status.clear()
            note(f"localq: {error}")
        except (OSError, termios.error):  # of a terminal or a pipe that is closed
            raise
        except Exception as error:
            if not sys.stdin.isatty():
                raise
            self.watcher.status.clear()
            note(f"localq: {error_log.unexpected('chat', error)}")

    def handle(self, line: str) -> int | SwitchModel | None:
        """Act on one message or command; None continues the chat."""
        if not line.strip():
            return None
        if not line.startswith("/") or line.startswith("//"):
            self.ask(line.removeprefix("/"))
            return None
        name, argument = commands.parse(line.strip())
        if name == "/exit":
            return ExitCode.OK
        previous = self.session.messages[-1].answer if name == "/continue" and self.session.messages else ""
        try:
            with self.interrupts.raise_inside():
                result = commands.COMMANDS[name](self.session, argument, self.host)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():  # with --plain a pipe gives commands
                raise
            note("(stopped)")
            return None
        if isinstance(result, SwitchModel):
            return result
        if isinstance(result, str):
            print_message(result, self._draws_markdown())
        else:
            self.stream(result, previous)
        return None

    def ask(self, text: str, piped: str = "") -> Reply | None:
        """Send piped text and a message with the files it names; returns the reply."""
        return self._send(lambda: commands.ask_with_files(self.session, text, piped))

    def _send(self, begin: Callable[[], tuple[tuple[str, ...], Replies]]) -> Reply | None:
        """Print the notices and the reply of `begin`, which sends a message."""
        try:
            with self.interrupts.raise_inside():
                notes, parts = begin()
            for line in notes:
                note(f"({line})")
        except KeyboardInterrupt:  # before there is a reply to stop
            if not sys.stdin.isatty():
                raise
            note("(stopped)")
            return None
        return self.stream(parts)

    def _draws_markdown(self) -> bool:
        """Return whether replies are drawn as Markdown; those by a grammar never are."""
        return self.host.markdown and self.session.grammar is None

    def stream(self, parts: Replies, previous: str = "") -> Reply | None:
        """Print a reply, or its continuation after `previous`; Ctrl-C stops it and keeps the text."""
        with (
            open_thoughts(self.watcher.quiet) as thoughts,
            stop_on_interrupt(self.session) as interruption,
            contextlib.closing(parts),
        ):
            if self.interrupts.take():  # after sending and before this
                interruption.is_requested = True
                self.session.stop()
            self.watcher.load(self.opened)
            with open_printer(self._draws_markdown(), previous) as printer:
                reply = print_reply(parts, self.watcher.status, thoughts, printer)  # a partial reply is kept
        self.interrupted = interruption.is_requested
        if reply is not None:
            for line in reply.notices:
                note(f"({line})")
            if self.show_stats and reply.reason != MEASURED:
                note(speed_line(reply.stats, self.session.loaded))
                if self.session.keeper is not None and (why := self.session.keeper.take_notice()):
                    note(f"[{why}]")
        note_lost_characters()
        return reply
