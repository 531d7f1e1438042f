"""Chats with tools: a tokenizer whose template has them, calls as Qwen models write them, servers.

A server takes a second or two to start, so the tests of a module share one (`serve`) and ask anew for every permission.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from localq.chat.session import ChatSession
from localq.chat.tools import servers
from localq.chat.tools.permissions import Decision, Permission, Question
from localq.chat.tools.toolbox import Toolbox, ToolLimits
from localq.errors import LocalqError
from tests.support.chat.scripted_client import CharTokenizer, session_over

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = shlex.join([sys.executable, str(SERVER)])
NAME = "mcp_server"  # of the server, by its file


class ToolTokenizer(CharTokenizer):
    """As `CharTokenizer`; renders declared tools, calls and results."""

    chat_template: str | None = "{{ tools }} {{ message.tool_calls }} <tool_call>"

    def chat_text(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        declared = ",".join(each["function"]["name"] for each in variables.get("tools") or ())
        return (f"<tools>{declared}" if declared else "") + "".join(map(_written, messages)) + "<assistant>"

    def stream(self, shown: Sequence[str] = ()) -> ToolTokenizer:
        return self


def _written(message: dict[str, Any]) -> str:
    calls = (each["function"] for each in message.get("tool_calls", ()))
    made = "".join(f"<call>{each['name']}{json.dumps(each['arguments'])}" for each in calls)
    return f"<{message['role']}>{message['content']}{made}"


def call(name: str, **arguments: Any) -> str:
    """A call as Qwen2.5 and Hermes write it (chat template of Qwen/Qwen2.5-7B-Instruct)."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tool_session(box: Toolbox | None, *scripts: list[str | list[int] | LocalqError] | str, **more: Any) -> ChatSession:
    """A session over scripted replies, with the tools of `box`."""
    replies = [[each] if isinstance(each, str) else each for each in scripts]
    session = session_over(*replies, **{"tokenizer": ToolTokenizer(), "context_size": 100_000, **more})
    session.record.model = "model"
    session.tools.toolbox = box
    return session


class Answers:
    """An asker that gives these decisions in turn; `asked` has the questions."""

    def __init__(self, *decisions: Decision) -> None:
        self.decisions, self.asked = list(decisions), list[Question]()

    def __call__(self, question: Question) -> None:
        self.asked.append(question)
        question.answer(self.decisions.pop(0))


@contextlib.contextmanager
def serve(home: Path, *named: str, limits: ToolLimits | None = None) -> Iterator[Toolbox]:
    """A toolbox with the test server, or with what is named; its servers' home and logs are below `home`."""
    with pytest.MonkeyPatch.context() as patch:
        at_home(patch, home)
        box = Toolbox(servers.parse(named or (COMMAND,), {}), limits)
        try:
            box.wait()
            yield box
        finally:
            box.close()


def at_home(patch: pytest.MonkeyPatch, home: Path) -> None:
    """Let `home` be the user's."""
    patch.setenv("HOME", str(home))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        patch.delenv(name, raising=False)


def forget(box: Toolbox) -> None:
    """Ask about every tool again."""
    for each in box.tools:
        box.set_permission(each.label, Permission.ASK)
    box.asker = None
    box.take_notices()
