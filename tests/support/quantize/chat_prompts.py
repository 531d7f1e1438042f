"""What users say in the chats that models are calibrated and judged on: `tests/data/prompts/*.txt`, our own words.

A chat a line, its turns between "||"; a system prompt stands before them in brackets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

PROMPTS = Path(__file__).parents[2] / "data" / "prompts"


@dataclass
class Chat:
    """asked: what the user says, turn by turn. messages: what has been said; at first the system prompt, if any."""

    asked: tuple[str, ...]
    messages: list[dict[str, str]] = field(default_factory=list)


def read_prompts(name: str) -> list[Chat]:
    """The chats of "calibration" or "held_out", unanswered."""
    return [_chat(line) for line in (PROMPTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()]


def _chat(line: str) -> Chat:
    found = re.fullmatch(r"(?:\[(.+?)\] )?(.+)", line)
    assert found, line
    system = [{"role": "system", "content": found[1]}] if found[1] else []
    return Chat(tuple(turn.strip() for turn in found[2].split("||")), system)
