"""The front ends as a test at a terminal sees them: how each starts, when it waits for a message, how one leaves it."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from terminal import CTRL_C, CTRL_D, ENTER, Gave, Terminal
from terminal_engine import Script
from terminal_localq import COMMAND, environment, write_model

EDITS = b"\x1b[?2004h"  # a line editor takes the terminal


@dataclass
class Place:
    """Where a user's files lie: `home`, the model's folder, the engine's script."""

    home: Path
    name: str = "model"
    model: Path = field(init=False)
    script: Path = field(init=False)

    def __post_init__(self) -> None:
        self.model, self.script = self.home / self.name, self.home / "script.json"
        if not self.model.exists():
            write_model(self.model)
        self.says(Script())

    def says(self, script: Script) -> None:
        """From the next load or reply on."""
        script.write(self.script)


class Line:
    """`localq chat MODEL --plain`."""

    name = "line"
    stops = (CTRL_C,)  # what stops a reply

    def start(self, place: Place, *more: str, size: tuple[int, int] = (80, 24), **environ: str) -> Terminal:
        """The chat; it may still be loading."""
        command = [*COMMAND, str(place.script), "chat", str(place.model), *more]
        return Terminal(command, environment(place.home, LOCALQ_UI="plain", **environ), size, place.home)

    def is_ready(self, terminal: Terminal) -> bool:
        """It waits for a message, and none is typed; where there is a line editor, it has the terminal."""
        lines = terminal.text.rstrip().splitlines()
        edited = 2004 in terminal.modes.on or not terminal.modes.ever
        return bool(lines) and lines[-1].strip() == ">>>" and edited

    def say(self, terminal: Terminal, text: str) -> None:
        """Send a message of one line."""
        terminal.send(text + ENTER)

    def exchange(self, terminal: Terminal, text: str) -> None:
        """A message or command, and all that comes of it."""
        before = terminal.raw.count(EDITS)
        self.say(terminal, text)
        terminal.until(lambda: terminal.raw.count(EDITS) > before and self.is_ready(terminal))

    def is_stopped(self, terminal: Terminal, count: int) -> bool:
        """`count` replies have been stopped so far, by what is told."""
        return len(re.findall(r"^\(stopped\b", terminal.scrolled, re.MULTILINE)) >= count

    def calm(self, terminal: Terminal) -> None:
        """Whatever it does, it waits for a message in the end; what was typed is not sent."""
        for _ in range(40):
            terminal.send("" if self.is_ready(terminal) else CTRL_C)
            with contextlib.suppress(Gave):
                terminal.until(lambda: self.is_ready(terminal), 0.5)
                terminal.until(lambda: not self.is_ready(terminal), 0.3)  # nothing more comes
            if self.is_ready(terminal) or terminal.process.poll() is not None:
                return
        raise Gave(f"it does not come to rest:\n{terminal.text}")

    def leave(self, terminal: Terminal) -> int:
        """As a user who has enough."""
        terminal.until(lambda: self.is_ready(terminal) or terminal.process.poll() is not None)
        terminal.send(CTRL_D)
        return terminal.wait()


FACES: dict[str, type[Line]] = {"line": Line}
