"""Export of a conversation as Markdown or JSON."""

from __future__ import annotations

import dataclasses
import html
import json
import re

from localq.chat.history.record import Record
from localq.chat.history.tool_rounds import ToolRound
from localq.sanitize import sanitize
from localq.text import thinking

SCHEMA = 1
FORMATS = ("md", "json")


def export_record(session: Record, format: str) -> str:
    """The current branch as "md" or "json", without terminal control characters."""
    return markdown(session) if format == "md" else as_json(session)


def markdown(session: Record) -> str:
    """A heading for each turn and its text unchanged, since replies are Markdown.

    Thoughts, attachments and tool calls are closed <details>.
    """
    parts = [f"# {session.name() or 'Conversation'}", f"Model: {session.model}"]
    conversation = session.conversation
    if conversation.system:
        decided = {} if session.settings is None else session.settings.origins
        origin = [f"(Set by {decided['system']})"] if "system" in decided else []
        parts += ["## System", conversation.system, *origin]
    for message in conversation.messages():
        cut = "" if message.complete else " (cut)"
        parts += [
            f"## {'You' if message.role == 'user' else 'Reply'}{cut}",
            *(part for file, text in message.attached_texts() for part in _folded(text, file.summary)),
            *(part for each in message.rounds for part in _round(each)),
            *_folded(message.thought, "Thought"),
            message.shown.strip("\n"),
        ]
    return sanitize("\n\n".join(parts) + "\n")


def _round(each: ToolRound) -> list[str]:
    """Thought and text before tool calls, and each call with its result, in fences that the texts do not end."""
    thought, answer = thinking.split_reply(each.content)
    parts = [*_folded(thought, "Thought"), *([answer.strip("\n")] if answer.strip() else [])]
    for call in each.calls:
        what = "Failed tool call" if call.failed else "Tool call"
        title = f"{what}: {call.server}: {call.tool}" if call.server else f"{what}: {call.tool}"
        parts += _folded(f"{_fenced(call.arguments)}\n\n{_fenced(call.result)}", title)
    return parts


def _fenced(text: str) -> str:
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _folded(text: str, title: str) -> list[str]:
    return [f"<details><summary>{html.escape(title)}</summary>", text, "</details>"] if text else []


def as_json(session: Record) -> str:
    """One object with `"schema": 1`; statistics with each reply, Unix seconds with each turn, thoughts apart."""
    conversation = session.conversation
    turns = [conversation.turns[index] for index in conversation.answered_path()]
    body = {
        "schema": SCHEMA,
        "title": session.name(),
        "model": session.model,
        "system": conversation.system,
        "settings": session.settings and dataclasses.asdict(session.settings),
        "messages": [
            {
                **dataclasses.asdict(turn.message),
                "content": turn.message.answer,
                "thought": turn.message.thought,
                "created_s": turn.created_s,
                "stats": turn.stats and turn.stats.to_dict(),
            }
            for turn in turns
        ],
    }
    text = json.dumps(body, ensure_ascii=False, indent=2)
    # Escaped, not dropped: a program that reads the file gets the original text.
    return (text if sanitize(text) == text else json.dumps(body, indent=2)) + "\n"


def code_blocks(text: str) -> list[str]:
    """Contents of fenced code blocks, an unclosed one included."""
    blocks: list[str] = []
    lines: list[str] = []
    fence = ""
    for line in text.split("\n"):
        found = re.match(r" {0,3}(`{3,}|~{3,})(.*)", line)
        if not fence and found and not ("`" in found[2] and found[1][0] == "`"):
            fence, lines = found[1], []
        elif fence and found and found[1].startswith(fence) and not found[2].strip():
            blocks.append("\n".join(lines))
            fence = ""
        elif fence:
            lines.append(line)
    return [*blocks, "\n".join(lines)] if fence else blocks
