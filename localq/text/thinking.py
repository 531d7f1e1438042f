"""Thought and answer: which part of a reply the model wrote for itself, told apart while it streams. Torch-free.

form     A reply that begins with `<think>` is a thought up to the first `</think>`, and an answer from there on (Qwen3,
         DeepSeek-R1 and its distillations, QwQ, Phi-4-reasoning, SmolLM3). Everywhere else the tags are plain text.
         Some templates write the opening tag themselves where the reply begins: `opened`
stored   The raw text is kept, with the tag that the prompt had, because the model's own template decides what it reads
         of earlier thoughts: most drop all up to `</think>`, SmolLM3 keeps it
shown    thought and answer without the tags and without the empty lines around them

The channels of gpt-oss are another form, `harmony.py`: a reply that begins with one of its marks is read there. What
one model said is given to another in the form of that one (`in_form_of`).
"""

from __future__ import annotations

import re
from typing import Any

from localq.errors import usage_error
from localq.sampling import THINK_CHOICES, THINK_LEVELS
from localq.text import harmony
from localq.text import template as frames

TAGS = OPENING, CLOSING = "<think>", "</think>"
TAIL_TOKENS = 16  # of a prompt, in which an opening tag must lie to open the reply
_OPENED = re.compile(re.escape(OPENING) + r"\s*\Z")
_NO_THOUGHT = re.compile(rf"{re.escape(OPENING)}\s*{re.escape(CLOSING)}\s*\Z")  # of a prompt for a reply without one


class ThoughtSplitter:
    """Text in, (thought, answer) out; the pieces together do not depend on how the text was cut.

    head      the raw text before the answer: tags, thought, empty lines. head + answer is the raw reply
    thinking  whether the thought goes on
    closing   what ends it
    """

    closing = CLOSING

    def __init__(self, opened: str = "", channels: bool = True) -> None:
        """opened: what the prompt has of the reply already (`opened`). channels: False of a model that does not speak
        in them: what looks like their marks is text, and is kept so that it stays text."""
        self.head, self.thinking, self._may = opened, bool(opened), channels
        self._begun = bool(opened)  # what the reply begins with is known
        self._answering = False  # the answer has begun
        self._thought = False  # something of the thought was given out
        self._held = ""
        self._channels: harmony.Channels | None = None  # of a reply in that form

    def push(self, text: str) -> tuple[str, str]:
        """What is certain now of the thought, and of the answer behind it."""
        if self._answering:
            return "", text
        self._held += text
        if not self._begun:
            self._begin()
        if self._channels is not None:
            return self._in_channels(self._channels)
        thought = self._more_thought() if self.thinking else ""
        return thought, self._begin_answer() if self._begun and not self.thinking else ""

    def finish(self) -> tuple[str, str]:
        """What was held back; the reply is over. A thought that was cut stays open."""
        if self._channels is not None:
            parts = self._channels.finish()
            self.head = self._channels.head
            return parts
        held, self._held = self._held, ""
        if self.thinking:
            self.head += held
            thought = held.rstrip()
            return (thought if self._thought else thought.lstrip("\n")), ""
        return "", held

    def _begin(self) -> None:
        start = self._held.lstrip()
        if start.startswith(OPENING):
            at = self._held.index(OPENING) + len(OPENING)
            self.head, self._held = self._held[:at], self._held[at:]
            self.thinking = self._begun = True
            return
        in_channels = harmony.begins_reply(self._held)
        if in_channels and not self._may:
            self._held, self._begun = harmony.escape_marks(self._held), True
        elif in_channels:
            self._channels, self._begun = harmony.Channels(), True
            self.closing = self._channels.closing
        elif in_channels is False and not OPENING.startswith(start):  # an empty start may become the tag too
            self._begun = True

    def _in_channels(self, channels: harmony.Channels) -> tuple[str, str]:
        parts, self._held = channels.push(self._held), ""
        self.head, self.thinking = channels.head, channels.thinking
        return parts

    def _more_thought(self) -> str:
        """The thought as far as it is certain: an end of white space, or of half a tag, waits."""
        at = self._held.find(CLOSING)
        certain = self._held[:at] if at >= 0 else self._held[: len(self._held) - _beginning(self._held)]
        piece = certain.rstrip()
        given = piece if self._thought else piece.lstrip("\n")
        self._thought = self._thought or bool(given)
        taken = len(piece) if at < 0 else at + len(CLOSING)
        self.head += self._held[:taken]
        self._held, self.thinking = self._held[taken:], at < 0
        return given

    def _begin_answer(self) -> str:
        """The answer from its first line on; behind a thought, empty lines before it are not part of it."""
        start = self._held.lstrip("\n") if self.head else self._held
        self.head += self._held[: len(self._held) - len(start)]
        self._held, self._answering = "", bool(start)
        return start


def opened_thought(tail: str) -> str:
    """The beginning of the reply that a prompt ending in `tail` has already: "<think>" and white space, or nothing."""
    found = _OPENED.search(tail)
    return found[0] if found else ""


def split_reply(content: str) -> tuple[str, str]:
    """(thought, answer) of a stored reply."""
    splitter = ThoughtSplitter()
    pieces = splitter.push(content), splitter.finish()
    return "".join(thought for thought, _ in pieces), "".join(answer for _, answer in pieces)


def close_thought(content: str) -> str:
    """`content` as most templates take it: in tags, and a thought that was cut ends there: what follows is none."""
    content = convert_for(None, content)
    splitter = ThoughtSplitter()
    splitter.push(content)
    return content.rstrip() + f"\n{CLOSING}\n\n" if splitter.thinking else content


def convert_for(template: str | None, content: str) -> str:
    """A stored reply in the form of the model with this chat template, to go on with: in channels, or in tags."""
    in_channels = harmony.begins_reply(content) is True
    if in_channels == harmony.is_template(template):
        return content
    splitter = ThoughtSplitter()
    parts = splitter.push(content), splitter.finish()
    thought, answer = ("".join(part[kind] for part in parts) for kind in (0, 1))
    if not in_channels:
        return harmony.format_reply(thought, answer, splitter.thinking)
    if splitter.thinking:
        return f"{OPENING}\n{thought}"
    return f"{OPENING}\n{thought}\n{CLOSING}\n\n{answer}" if thought else answer


def template_content(template: str | None, role: str, content: str) -> str:
    """What a chat template is given of a stored message: what frames turns is plain text in it. One of channels gets
    answers alone."""
    if harmony.is_template(template):
        return harmony.escape_marks(split_reply(content)[1] if role == "assistant" else content)
    return frames.escape_marks(template, close_thought(content) if role == "assistant" else content)


def continue_prompt(prompt: str, begun: str) -> str:
    """`prompt` with the stored beginning of a reply behind it, whose thought takes the place of the one that the prompt
    opens, or of the empty one that it has."""
    opening, none = opened_thought(prompt), _NO_THOUGHT.search(prompt)
    if begun.lstrip().startswith(OPENING):
        return prompt[: none.start() if none else len(prompt) - len(opening)] + begun
    return prompt + (f"\n{CLOSING}\n\n" if opening else "") + begun


def minimal_variables(template: str | None) -> dict[str, Any]:
    """What a chat template is given so that the model thinks as little as it can."""
    text = template or ""
    if "enable_thinking" in text:
        return {"enable_thinking": False}
    return {"reasoning_effort": THINK_LEVELS[0]} if "reasoning_effort" in text else {}


def validate(think: str) -> str:
    """`think`, or LocalqError (exit 2) where it is none of THINK_CHOICES."""
    if think not in THINK_CHOICES:
        raise usage_error("think", f"'{think}' is not allowed", f"Use one of {', '.join(THINK_CHOICES)}.")
    return think


def variables(template: str | None, think: str) -> dict[str, Any]:
    """What a chat template is given so that the model thinks as `think` says: "auto", "on", "off" or a level.

    Empty for "auto", which is the model's own way. Raises LocalqError (exit 2) where the template has no such choice.
    """
    text = template or ""
    switch, level = "enable_thinking" in text, "reasoning_effort" in text
    if think == "auto":
        return {}
    if think in THINK_LEVELS and level:
        return {"reasoning_effort": think} | ({"enable_thinking": True} if switch else {})
    if think in THINK_LEVELS:
        step = (
            "--think and --no-think turn it on and off." if switch else "Leave it out: the model does as it was made."
        )
        raise usage_error(f"think {think}", "the model's template knows no levels of thinking", step)
    if switch:
        return {"enable_thinking": think == "on"}
    if think == "on" and (level or OPENING in text or CLOSING in text):
        return {}  # it has no choice: it thinks
    if level:
        raise usage_error("think off", "the model always thinks", "--think low is the least.")
    why = "the model's template has no such switch"
    raise usage_error(f"think {think}", why, "Leave it out: the model does as it was made.")


def _beginning(text: str) -> int:
    """Characters at the end of `text` that may be the beginning of the closing tag: the longest such end."""
    return next((size for size in range(len(CLOSING) - 1, 0, -1) if text.endswith(CLOSING[:size])), 0)
