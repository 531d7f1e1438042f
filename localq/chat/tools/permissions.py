"""Permissions of tools, and the question about a call. Starts no servers and no event loop."""

from __future__ import annotations

import contextlib
import enum
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localq.chat.history.tool_rounds import call_line
from localq.text.tools.declaration import Tool

MOST_DESCRIPTION = 2000  # characters that the model reads


class Permission(enum.StrEnum):
    """Permission to call a tool: ask the user, allowed for this chat, or never."""

    ASK = "ask"
    ALLOWED = "allowed"
    NEVER = "never"


class Decision(enum.StrEnum):
    """The answer to a question about a call; STOP: the user stops the reply."""

    ONCE = "once"
    SESSION = "session"
    REFUSE = "refuse"
    NEVER = "never"
    STOP = "stop"


@dataclass(frozen=True)
class OfferedTool:
    """A tool of a server. label: its name for the model and the user, with that of its server if two have one."""

    server: str
    name: str
    label: str
    description: str
    schema: dict[str, Any]

    @property
    def declared(self) -> Tool:
        """The tool as the model gets it."""
        return Tool(self.label, self.description[:MOST_DESCRIPTION], self.schema)


class Question:
    """A call that waits for the user: `answer` it from any thread; `wait` returns the first answer."""

    def __init__(self, tool: OfferedTool, arguments: str) -> None:
        import concurrent.futures  # start-up cost: most chats have no tools

        self.tool, self.arguments = tool, arguments
        self._answered: concurrent.futures.Future[Decision] = concurrent.futures.Future()

    def answer(self, decision: Decision) -> None:
        """Answer the question; later answers do not count."""
        import concurrent.futures

        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._answered.set_result(decision)

    def wait(self) -> Decision:
        """Wait for the answer."""
        return self._answered.result()

    @property
    def is_answered(self) -> bool:
        """True once there is an answer."""
        return self._answered.done()

    def on_answer(self, act: Callable[[], object]) -> None:
        """Call `act` in the thread of the answer."""
        self._answered.add_done_callback(lambda _: act())

    @property
    def argument_lines(self) -> list[str]:
        """Each argument with its value as JSON, in which nothing is hidden: unsafe characters are escaped."""
        values = json.loads(self.arguments)
        return [f"{_visible(name)}: {_visible(value)}" for name, value in values.items()] or ["(no arguments)"]


def shown_call(tool: str, arguments: str, server: str = "") -> str:
    """A call on one line."""
    return call_line(server, tool, _visible_text(arguments))


def _visible(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w-]{0,60}", value, re.ASCII):
        return value
    return _visible_text(json.dumps(value, ensure_ascii=False))


def _visible_text(text: str) -> str:
    """JSON text with every character that is not printable escaped."""
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)
