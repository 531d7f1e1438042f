"""The full screen has the size that its terminal has last."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.cli.terminal import Terminal
from tests.support.cli.terminal_localq import environment
from tests.support.tui.tui_pilot import chat_app, drive_chat, until

SECOND_SIZE = """
import fcntl, struct, sys, termios, time
from textual.widgets import Static
from localq.tui.terminal.terminal_app import TerminalApp

class Shown(TerminalApp):
    def compose(self):
        yield Static("begun")

    def on_mount(self):
        self.set_interval(0.05, self.draw)
        self.set_timer(0.1, self.arm)

    def draw(self):
        armed = "_get_terminal_size" in vars(self._driver)
        self.query_one(Static).update(f"{self.size.width} by {self.size.height}{', armed' * armed}")

    def arm(self):
        read = self._driver._get_terminal_size

        def once_more():
            size = read()
            if size == (60, 20):
                fcntl.ioctl(sys.__stdout__.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 15, 50, 0, 0))
                time.sleep(0.05)  # the signal of that size comes while this one is answered
            return size

        self._driver._get_terminal_size = once_more

sys.exit(Shown().run())
"""


@pytest.fixture
def terminal(tmp_path):
    terminal = Terminal([sys.executable, "-c", SECOND_SIZE], environment(tmp_path), folder=tmp_path)
    yield terminal
    terminal.process.kill()
    terminal.process.wait()
    os.close(terminal.slave)
    os.close(terminal.master)


def test_a_size_that_comes_while_another_is_read_is_the_one_that_stays(terminal):
    terminal.until("80 by 24, armed")
    terminal.resize(60, 20)
    terminal.until("50 by 15")
    for _ in range(10):  # it draws every 0.05 s
        terminal.read(0.05)
    assert "50 by 15" in terminal.text


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (4, 24)])
@pytest.mark.parametrize("key", ["slash", "ctrl+p"])
def test_a_list_has_lines_in_no_room_at_all(key, size):
    app = chat_app(["ok"])

    async def script(pilot):
        await pilot.press(key)
        await until(pilot, lambda: app.screen.query("OptionList").first().display)
        await pilot.resize_terminal(*size)
        await pilot.pause()
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: app.screen.query("OptionList").first().size.width > 40)

    drive_chat(app, script)
