"""A program under tmux: keys, what the pane shows, and pictures of it."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.support.cli.terminal_faces import EMPTY
from tests.support.cli.terminal_localq import environment

ROOT = Path(__file__).parents[2]
WAIT_S = 40.0
HEADLINE = "smollm2-135m · "  # of a reply: its model, and what follows
SERVERS = itertools.count()
TRIES, AGAIN_S = 5, 3.0  # to send a message, and how long it may take


class Pane:
    """One tmux session with a server of its own; `text` is what it shows, after the end too.

    pictures: a folder for what `keep` is told to; None = it keeps nothing.
    """

    def __init__(self, home: Path, size: tuple[int, int], *command: str, pictures: Path | None = None) -> None:
        self.size, self.home, self.pictures = size, home, pictures
        self.socket = str(home / f"tmux-{next(SERVERS)}.socket")  # one that is ending has its own yet
        values = {**environment(home, TERM="screen-256color"), "LOCALQ_DEVICE": "cpu"}
        given = ("LOCALQ_", "HF_", "XDG_", "HOME", "PYTHONPATH", "COLORTERM")
        line = ["env", *(f"{name}={value}" for name, value in values.items() if name.startswith(given)), *command]
        where = ("new-session", "-d", "-x", str(size[0]), "-y", str(size[1]))
        self.tmux(*where, *line, ";", "set", "-g", "remain-on-exit", "on")

    def tmux(self, *arguments: str) -> str:
        command = ["tmux", "-S", self.socket, "-f", "/dev/null", *arguments]
        environ = environment(self.home)  # given: readline in a test's process sets COLUMNS where os.environ has none
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20, cwd=ROOT, env=environ
        ).stdout

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        self.tmux("send-keys", "-l", text)

    @property
    def text(self) -> str:
        return self.tmux("capture-pane", "-p")

    def until(self, *wanted: str, but: str = "\0") -> str:
        """The pane once all of that is seen, and not the other."""
        return self.when(
            lambda shown: all(each in shown for each in wanted) and but not in shown, f"{wanted} without {but!r}"
        )

    def when(self, holds: Callable[[str], bool], what: str) -> str:
        """The pane once that holds of its text."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            shown = self.text
            if holds(shown):
                return shown
            time.sleep(0.05)
        raise AssertionError(f"not seen: {what}, but\n{self.text}")

    def send(self, text: str) -> None:
        """Type it and press Enter; once more where what came before was still being done, and it was given back."""
        self.type(text)
        self.until(text)
        for _ in range(TRIES):
            self.keys("Enter")
            end, seen = time.monotonic() + AGAIN_S, 0
            while time.monotonic() < end and seen < 2:
                time.sleep(0.2)
                seen = seen + 1 if EMPTY in self.text else 0
            if seen == 2:
                return
        raise AssertionError(f"not sent: {text!r}, but\n{self.text}")

    def answering(self, lines: int) -> None:
        """Until a reply runs that has so many lines."""
        self.until("answering", "tok/s")
        self.when(lambda shown: len(_reply_lines(shown)) >= lines, f"{lines} lines of a reply")

    def answered(self, question: str) -> None:
        """Until what follows the question is a reply, and nothing goes on or is drawn any more."""
        shown, before, end = "", None, time.monotonic() + WAIT_S
        while shown != before or HEADLINE not in shown.rpartition(question)[2] or not self.is_ready(shown):
            assert time.monotonic() < end, f"no reply to {question!r}, but\n{shown}"
            time.sleep(0.3)
            before, shown = shown, self.text

    def still(self) -> None:
        """Until nothing is drawn any more."""
        before, end = None, time.monotonic() + WAIT_S
        while (shown := self.text) != before:
            assert time.monotonic() < end, f"it does not come to rest:\n{shown}"
            before = shown
            time.sleep(0.3)

    @staticmethod
    def is_ready(shown: str) -> bool:
        """By the line at the bottom."""
        return shown.rstrip().rpartition("\n")[2].strip().startswith("ready")

    def whole(self) -> str:
        """Nothing is cut: no line is wider than the window, the bottom is where it belongs."""
        lines = self.text.rstrip("\n").split("\n")
        assert len(lines) == self.size[1], self.tmux("display", "-p", "#{window_width}x#{window_height}") + self.text
        assert all(len(line) <= self.size[0] for line in lines)
        assert lines[-1].strip().startswith(("ready", "answering", "reading", "thinking")), lines[-1]
        frame = lines[-2].partition("▏")[0].strip()
        assert (frame[0], frame[-1]) == ("╰", "╯"), lines[-2]  # the frame of the message, nothing over it
        return "\n".join(lines)

    def keep(self, name: str) -> None:
        """A picture of what is shown, as PICTURES/SIZE-NAME.svg. No path of this machine may be seen on it."""
        if self.pictures is None:
            return
        shown = self.text
        assert not any(str(each) in shown for each in (self.home, ROOT, sys.prefix)), shown
        drawn = picture(self.tmux("capture-pane", "-e", "-N", "-p"), self.size[0])
        (self.pictures / f"{self.size[0]}x{self.size[1]}-{name}.svg").write_text(drawn, "utf-8")

    def close(self) -> None:
        subprocess.run(["tmux", "-S", self.socket, "kill-server"], capture_output=True, check=False, timeout=20)


def picture(shown: str, columns: int) -> str:
    """An SVG of text with colours, as `tmux capture-pane -e` writes it, in a terminal so wide."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    text = Text.from_ansi(shown.rstrip("\n"), no_wrap=True, overflow="crop")
    console.print(text, soft_wrap=False, highlight=False)
    drawn = console.export_svg(title="localq")
    return "\n".join(line.rstrip() for line in drawn.replace("&#160;", "\N{NO-BREAK SPACE}").split("\n"))


def _reply_lines(shown: str) -> list[str]:
    """What stands under the last headline of a reply and above the message."""
    below = shown.rpartition(HEADLINE)[2].rstrip().split("\n")[1:-4]
    return [line for line in below if line.strip()]
