"""The tags between which models write their thoughts, and the text around an answer that is not part of it.

A model's family has one pair; a stored reply shows by its beginning which. Sources: the published chat templates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Tags:
    """A pair of tags. inside: white space that stands before and after a thought; below: between tag and answer."""

    opening: str
    closing: str
    inside: str = "\n"
    below: str = "\n\n"

    @property
    def ending(self) -> str:
        """Text that ends an unfinished thought."""
        return self.inside + self.closing + self.below

    def wrap(self, thought: str) -> str:
        """The start of a reply with this thought, without its end."""
        return self.opening + self.inside + thought


THINK = Tags("<think>", "</think>")  # Qwen3, DeepSeek, GLM, Nemotron, Laguna, LFM, SmolLM3, Phi-4-reasoning, and others
PAIRS = (
    THINK,
    Tags("[THINK]", "[/THINK]", "", ""),  # Magistral, Ministral 3 Reasoning
    Tags("<|START_THINKING|>", "<|END_THINKING|>", "", ""),  # Command A Reasoning, North
    Tags("<|channel>thought", "<channel|>", below=""),  # Gemma 4
    Tags("<seed:think>", "</seed:think>", "", ""),  # Seed-OSS
    Tags("<thought>", "</thought>"),  # EXAONE Deep
    Tags("<|inner_prefix|>", "<|inner_suffix|>", "", ""),  # Apertus
    Tags("<|begin_of_thought|>", "<|end_of_thought|>"),  # OpenThinker, Sky-T1
    Tags("\u25c1think\u25b7", "\u25c1/think\u25b7", "", ""),  # Kimi
)
# Tokens of these texts are kept as text, although files call some of them special.
TOKENS = frozenset(each.opening.removesuffix("thought") for each in PAIRS) | {each.closing for each in PAIRS}
# Tokens that frame an answer; they are left out, although files call some of them text.
ANSWER_FRAMES = frozenset(
    ("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>",
     "<|begin_of_solution|>", "<|end_of_solution|>")
)  # fmt: skip
# Tags of a kind that is not listed: left out, they would make a thought part of the answer without a border.
_OF_THOUGHTS = re.compile("think|thought|reason", re.IGNORECASE)
_OPENINGS = "|".join(re.escape(each.opening) for each in PAIRS)
_OPENED = re.compile(rf"(?:{_OPENINGS})\s*\Z")
_NO_THOUGHT = re.compile(
    "(?:" + "|".join(rf"{re.escape(each.opening)}\s*{re.escape(each.closing)}" for each in PAIRS) + r")\s*\Z"
)


def is_shown(token: str) -> bool:
    """Return whether a special token is part of a reply's text, as tags of thoughts are."""
    return token in TOKENS or _OF_THOUGHTS.search(token) is not None


def begun_by(text: str) -> Tags | None:
    """The tags that `text` begins with, after white space."""
    start = text.lstrip()
    return next((each for each in PAIRS if start.startswith(each.opening)), None)


def may_begin(text: str) -> bool:
    """Return whether more text could make `text` begin with a tag."""
    start = text.lstrip()
    return any(each.opening.startswith(start) for each in PAIRS)


def of_template(template: str | None) -> Tags | None:
    """The tags that a chat template mentions, None for none."""
    text = template or ""
    return next((each for each in PAIRS if each.opening in text or each.closing in text), None)


def opening_at_end(text: str) -> str:
    """The opening tag and white space at the end of `text`, or ""."""
    found = _OPENED.search(text)
    return found[0] if found else ""


def without_empty_thought(text: str) -> str | None:
    """`text` without the empty thought at its end; None where it has none there."""
    found = _NO_THOUGHT.search(text)
    return text[: found.start()] if found else None
