"""The question before a tool call, at a terminal: once, for this session, no, never."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from localq.chat.tools.permissions import Decision, Question
from localq.cli.output import ask, note

CHOICES = "[y] once  [s] for this session  [n] no  [v] never in this session: "
_ANSWERS = {
    "y": Decision.ONCE, "yes": Decision.ONCE, "once": Decision.ONCE,
    "s": Decision.SESSION, "session": Decision.SESSION,
    "n": Decision.REFUSE, "no": Decision.REFUSE, "": Decision.REFUSE,
    "v": Decision.NEVER, "never": Decision.NEVER,
}  # fmt: skip
MOST_CHARACTERS = 20_000  # of an argument; the middle of a longer one is left out
MOST_BYTES = 4096  # of an answer


def ask_at_terminal(question: Question, aside: Callable[[], AbstractContextManager[None]]) -> None:
    """Show the call and read the answer; Ctrl-C stops the reply, which answers the question as well.

    aside: context in which the terminal has its usual attributes
    """
    note(f"Call {question.tool.label} from {question.tool.server}?")
    for line in question.argument_lines:
        note(f"  {shorten(line)}")
    with aside(), _woken_by(question) as woken:
        with contextlib.suppress(termios.error):
            termios.tcflush(sys.stdin, termios.TCIFLUSH)  # what was typed before is no answer
        while not question.is_answered:
            ask(CHOICES)
            typed = _read(woken)
            if typed is None:
                note()
                return
            if (decision := _ANSWERS.get(typed.strip().casefold())) is not None:
                question.answer(decision)


def shorten(text: str) -> str:
    """`text`, without the middle of a very long one."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} ({len(text) - 2 * half:,} more characters) {text[-half:]}"


@contextlib.contextmanager
def _woken_by(question: Question) -> Iterator[int]:
    """A descriptor that is readable once the question is answered elsewhere."""
    woken, wake = os.pipe()
    guard, is_open = threading.Lock(), [True]

    def write() -> None:
        with guard:  # in the thread of the answer, which may be late
            if is_open:
                os.write(wake, b".")

    question.on_answer(write)
    try:
        yield woken
    finally:
        question.answer(Decision.REFUSE)  # after an error; an earlier answer counts
        with guard:
            is_open.clear()
            os.close(woken)
            os.close(wake)


def _read(woken: int) -> str | None:
    """A line of the terminal; None where the question was answered meanwhile. The end of input is "no"."""
    stdin = sys.stdin.fileno()
    ready, _, _ = select.select([stdin, woken], [], [])
    return None if woken in ready else os.read(stdin, MOST_BYTES).decode("utf-8", "replace")
