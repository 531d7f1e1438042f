"""The front ends as a test at a terminal sees them: how each starts, when it waits for a message, how one leaves it."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.cli.terminal import CTRL_C, CTRL_D, ENTER, ESCAPE, Gave, Terminal
from tests.support.cli.terminal_engine import Script
from tests.support.cli.terminal_localq import CHAT_TEMPLATE, COMMAND, environment, write_model

EDITS = b"\x1b[?2004h"  # a line editor takes the terminal
EMPTY = "Message, or / for commands"  # stands where a message would
TRIES = 40  # to bring it to rest, each of 0.3 to 0.8 s
GIVEN_BACK_S = 0.2  # within which a message that is refused is there again
RESENT, RESEND_S = 5, 3.0  # how often, and after how long, a message that was refused is sent again


@dataclass
class Place:
    """Where a user's files lie: `home`, the model's folder, the engine's script."""

    home: Path
    name: str = "model"
    template: str = CHAT_TEMPLATE
    model: Path = field(init=False)
    script: Path = field(init=False)

    def __post_init__(self) -> None:
        self.model, self.script = self.home / self.name, self.home / "script.json"
        if not self.model.exists():
            write_model(self.model, self.template)
        self.says(Script())

    def says(self, script: Script) -> None:
        """From the next load or reply on."""
        script.write(self.script)


class Line:
    """`localq chat MODEL --plain`."""

    name = "line"
    ui = "plain"
    stops = (CTRL_C,)  # what stops a reply
    leaves = CTRL_D
    hint = "Ctrl-C again"  # what is told at an empty message, before the second press leaves
    presses_while_loading = 1  # until it ends
    keys: tuple[str, ...] = ()  # that open what else there is

    def start(self, place: Place, *more: str, size: tuple[int, int] = (80, 24), **environ: str) -> Terminal:
        """The chat; it may still be loading."""
        command = [*COMMAND, str(place.script), "chat", str(place.model), *more]
        return Terminal(command, environment(place.home, LOCALQ_UI=self.ui, **environ), size, place.home)

    def is_ready(self, terminal: Terminal) -> bool:
        """It waits for a message, and none is typed; where there is a line editor, it has the terminal."""
        lines = terminal.text.rstrip().splitlines()
        edited = 2004 in terminal.modes.on or not terminal.modes.ever
        return bool(lines) and lines[-1].strip() == ">>>" and edited

    def has_begun(self, terminal: Terminal) -> bool:
        """What was said is being answered."""
        return not self.is_ready(terminal)

    def has_reacted(self, terminal: Terminal, count: int) -> bool:
        """The user sees that the press, by which the reply `count` ends, was heard."""
        return self.is_stopped(terminal, count)

    def say(self, terminal: Terminal, text: str) -> None:
        """Send a message of one line."""
        terminal.send(text + ENTER)

    def exchange(self, terminal: Terminal, text: str, seen: str = "") -> None:
        """A message or command, and all that comes of it; where it is known, what is `seen` then."""
        before = terminal.raw.count(EDITS)
        self.say(terminal, text)
        terminal.until(lambda: terminal.raw.count(EDITS) > before and self.is_ready(terminal))

    def is_stopped(self, terminal: Terminal, count: int) -> bool:
        """`count` replies have been stopped so far, by what is told."""
        return len(re.findall(r"^(?:\^C)?\(stopped\b", terminal.scrolled, re.MULTILINE)) >= count

    def hints(self, terminal: Terminal) -> int:
        """How often it was told how to leave."""
        return terminal.scrolled.count(self.hint)

    def has_hinted(self, terminal: Terminal, before: int) -> bool:
        """It was told more often than `before`: the press is answered."""
        return self.hints(terminal) > before

    def calm(self, terminal: Terminal, tries: int = TRIES) -> None:
        """Whatever it does, it waits for a message in the end; what was typed is not sent."""
        for _ in range(tries):
            if not self.is_ready(terminal):
                self.soothe(terminal)
            with contextlib.suppress(Gave):
                terminal.until(lambda: self.is_ready(terminal), 0.5)
                terminal.until(lambda: not self.is_ready(terminal), 0.3)  # nothing more comes
            if self.is_ready(terminal) or terminal.process.poll() is not None:
                return
        raise Gave(f"it does not come to rest:\n{terminal.text}")

    def soothe(self, terminal: Terminal) -> None:
        """Stop what runs, take back what is typed."""
        terminal.catch_up()
        terminal.send(CTRL_C)

    def leave(self, terminal: Terminal) -> int:
        """As a user who has enough."""
        terminal.until(lambda: self.is_ready(terminal) or terminal.process.poll() is not None)
        terminal.send(self.leaves)
        return terminal.wait()


class Tui(Line):
    """`localq chat MODEL`, the full screen."""

    name = "tui"
    ui = "tui"
    stops = (CTRL_C, ESCAPE)
    hint = "Press again"
    presses_while_loading = 2
    leaves = "\x11"  # Ctrl-Q, wherever the keys go
    keys = ("\x1bOP", "\x1bOQ", "\x1bOR", "\x1bOS", "\x02", "\x10", "\x13", "\x0f", "\x14")

    def status(self, terminal: Terminal) -> str:
        """The line at the bottom."""
        return terminal.text.rstrip().rpartition("\n")[2].strip()

    def is_ready(self, terminal: Terminal) -> bool:
        """The line at the bottom says so, and the message is empty."""
        return self.status(terminal).startswith("ready") and EMPTY in terminal.text

    def has_begun(self, terminal: Terminal) -> bool:
        """By the line at the bottom."""
        return not self.status(terminal).startswith("ready")

    def has_reacted(self, terminal: Terminal, count: int) -> bool:
        """It says that it stops, or has."""
        return "stopping" in self.status(terminal) or self.is_stopped(terminal, count)

    def say(self, terminal: Terminal, text: str) -> None:
        """Type it, and send it when it is there."""
        terminal.send(text)
        terminal.until(lambda: EMPTY not in terminal.text)
        terminal.send(ENTER)

    def exchange(self, terminal: Terminal, text: str, seen: str = "") -> None:
        """Until it is sent and `seen`, and nothing more is drawn. What was refused because the one before was still
        being done is given back at once: it is sent again."""
        self.say(terminal, text)
        for _ in range(RESENT):
            with contextlib.suppress(Gave):
                terminal.until(lambda: EMPTY in terminal.text, RESEND_S)
            try:
                terminal.until(lambda: EMPTY not in terminal.text, GIVEN_BACK_S)
            except Gave:
                break
            terminal.send(ENTER)
        if seen:
            terminal.until(seen)
        terminal.until(lambda: self.is_ready(terminal))
        terminal.settle()

    def has_hinted(self, terminal: Terminal, before: int) -> bool:
        """It is told in a corner, for as long as the next press leaves."""
        return self.hint in terminal.text

    def is_stopped(self, terminal: Terminal, count: int) -> bool:
        """By what is told under the reply, or instead of one."""
        _, asked, reply = terminal.text.rpartition(f"▌ say {count}.")
        ended = "stopped" in reply or "engine process" in reply  # the second press has ended that
        return self.is_ready(terminal) and (not asked or ended)

    def calm(self, terminal: Terminal, tries: int = TRIES) -> None:
        """Keys go to the message then: a click there has them."""
        super().calm(terminal, tries)
        for row, line in enumerate(terminal.text.splitlines(), 1):
            if EMPTY in line:  # which has not ended; there may be a panel left of it
                place = f"{line.index(EMPTY) + len(EMPTY)};{row}"
                terminal.send(f"\x1b[<0;{place}M\x1b[<0;{place}m")

    def soothe(self, terminal: Terminal) -> None:
        """Close what lies over the conversation, or stop the reply; then take back what is typed."""
        terminal.send(ESCAPE)
        with contextlib.suppress(Gave):  # there may be nothing to close
            terminal.until(lambda: self.is_ready(terminal), 0.3)
        if not self.is_ready(terminal):
            terminal.send("\x1b[18~\x7f")  # F7: all of it


FACES: dict[str, type[Line]] = {"line": Line, "tui": Tui}
