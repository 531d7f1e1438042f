"""Tool calls of a reply, as a conversation keeps them: rounds of text, calls and results before the final text.

A reply with calls is one turn, so user messages and replies alternate whatever the model calls. Its rounds are saved
with the statistics of the turn; versions without them show the final text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MOST_SHOWN = 200  # characters of arguments on one line


@dataclass(frozen=True)
class CallRecord:
    """A tool call and its result.

    id         nine letters and digits, which templates of Mistral want, unique in the conversation
    tool       name by which the model called it
    arguments  JSON text of an object
    server     the server that has the tool; empty for an unknown tool
    result     text that the model reads: the result, or why there is none
    failed     the result is an error: of the tool, of the server, or because the call was not allowed
    """

    id: str
    tool: str
    arguments: str
    server: str = ""
    result: str = ""
    failed: bool = False

    @property
    def line(self) -> str:
        """Server, tool and arguments on one line, shortened."""
        return call_line(self.server, self.tool, self.arguments)


@dataclass(frozen=True)
class ToolRound:
    """A part of a reply that ended in calls. content: raw text before them, with the thought (`text.thinking`)."""

    content: str
    calls: tuple[CallRecord, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all texts, as UTF-8."""
        texts = [self.content, *(part for each in self.calls for part in (each.tool, each.arguments, each.result))]
        return sum(len(each.encode("utf-8", "replace")) for each in texts)


def call_line(server: str, tool: str, arguments: str) -> str:
    """A call on one line: "files: read_file {"path": "a.txt"}", with shortened arguments."""
    words = " ".join(arguments.split())
    shown = words if len(words) <= MOST_SHOWN else f"{words[:MOST_SHOWN]}..."
    return f"{server}: {tool} {shown}" if server else f"{tool} {shown}"


def rounds_from(saved: Iterable[dict[str, Any]]) -> tuple[ToolRound, ...]:
    """Inverse of `dataclasses.asdict` through JSON. Raises TypeError and others for anything else."""
    return tuple(ToolRound(_text(each["content"]), tuple(map(_call, each["calls"]))) for each in saved)


def _call(saved: dict[str, Any]) -> CallRecord:
    id, tool, arguments, server, result = (
        _text(saved[name]) for name in ("id", "tool", "arguments", "server", "result")
    )
    return CallRecord(id, tool, arguments, server, result, bool(saved["failed"]))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in the place of a text")
    return value
