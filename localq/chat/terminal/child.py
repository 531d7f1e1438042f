"""A program of the user's choice at the terminal: a pager or an editor.

A signal that ends localq ends the program first, and the terminal is as it was before: less ends at a hangup without
resetting it, and subprocess.run kills (SIGKILL) its program when a signal handler raises.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import termios
from collections.abc import Sequence
from typing import Any

TERMINAL = 1  # the descriptor
NORMAL_KEYS = b"\x1b[?1l\x1b>"  # ends the application mode of cursor keys and keypad
TO_END_SECONDS = 2.0  # for a program that is told to end; one that Ctrl-S has stopped does not
RESET_WITHIN_SECONDS = 0.5  # a stopped terminal takes no output


def run(command: Sequence[str], text: str | None = None, **more_environment: str) -> int:
    """Run a program, which reads `text` from stdin if there is one, and return its exit code.

    Raises OSError if it cannot be run.
    """
    attributes = _attributes()
    program = subprocess.Popen(
        command, stdin=None if text is None else subprocess.PIPE, env={**more_environment, **os.environ},
        encoding="utf-8", errors="replace",
    )  # fmt: skip
    try:
        program.communicate(text)  # one that ends before it has read everything is no error
    except BaseException:  # raised by the handler of a signal
        program.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(TO_END_SECONDS)
        program.kill()
        _reset(attributes)
        raise
    if program.returncode < 0:  # it crashed, or was killed
        _reset(attributes)
    return program.returncode


def _attributes() -> list[Any] | None:
    try:
        return termios.tcgetattr(TERMINAL)
    except termios.error:
        return None


def _reset(attributes: list[Any] | None) -> None:
    with contextlib.suppress(OSError, termios.error):
        if select.select([], [TERMINAL], [], RESET_WITHIN_SECONDS)[1]:
            os.write(TERMINAL, NORMAL_KEYS)
        if attributes is not None:
            termios.tcsetattr(TERMINAL, termios.TCSANOW, attributes)
