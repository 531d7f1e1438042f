"""Thought and answer of a reply, split while it streams.

form     A reply that begins with an opening tag (`thought_tags`), such as `<think>`, is a thought up to the first
         closing tag, then an answer. Elsewhere the tags are plain text. Some templates end the prompt with the opening
         tag: `thought_opening`
stored   The raw text, with the tag from the prompt, because the model's template decides what prompts have of earlier
         thoughts: most drop all up to `</think>`, SmolLM3 keeps it
shown    Thought and answer without the tags and the empty lines around them

gpt-oss uses channels instead (`harmony`). A reply of one model is converted for the template of another
(`convert_for`), also from the tags of one to those of another.
"""

from __future__ import annotations

from typing import Any

from localq.errors import usage_error
from localq.sampling import THINK_CHOICES, THINK_LEVELS
from localq.text import harmony, thinking_levels, thought_tags
from localq.text.thinking_levels import listing
from localq.text.thought_tags import THINK, Tags
from localq.text.tokenizer_like import TokenizerLike
from localq.text.tools.channels import ToolChannels
from localq.text.turn_marks import TurnMarks

_THOUGHT_FIELD = "reasoning_content"  # of a message, from which most templates since Qwen3 read a thought
_PRESERVE = "preserve_thinking"  # variable of Qwen3.6 and newer, and of Gemma 4
TAIL_TOKENS = 16  # an opening tag within these last tokens of a prompt opens the reply


class ThoughtSplitter:
    """Text in, (thought, answer) out; the result does not depend on how the text is cut into pieces.

    head      the raw text before the answer: tags, thought, empty lines. head + answer is the raw reply
    thinking  the thought has not ended
    tags      around the thought; None for a reply without one, and for one in channels
    closing   the mark that ends it
    """

    def __init__(self, opened: str = "", channels: bool = True, tools: bool = False) -> None:
        """opened: start of the reply in the prompt (`thought_opening`). channels: False for a model without channels:
        text that looks like their marks is escaped, so that it stays text. tools: messages to tools are no thoughts."""
        self.head, self.thinking, self._may, self._tools = opened, bool(opened), channels, tools
        self.tags = thought_tags.begun_by(opened)
        self.closing = (self.tags or THINK).closing
        self._begun = bool(opened)  # the form of the reply is known
        self._answering = False  # the answer has begun
        self._thought = False  # part of the thought was returned
        self._held = ""
        self._channels: harmony.Channels | None = None  # for a reply in channels

    @property
    def over(self) -> bool:
        """True once no thought follows: it has ended, or the reply begins with something else."""
        return self._begun and not self.thinking if self._channels is None else not self._channels.thinking

    @property
    def in_header(self) -> bool:
        """True while text belongs to the header of a message in a channel, not to thought or answer."""
        return self._channels is not None and self._channels.in_header

    def take_messages(self) -> list[tuple[str, str]]:
        """Messages to tools since the last time: recipient and text."""
        return self._channels.take_messages() if isinstance(self._channels, ToolChannels) else []

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return what is final now of thought and answer."""
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
        """End the reply; return the held text. A thought that was cut stays open."""
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
        if (tags := thought_tags.begun_by(self._held)) is not None:
            at = self._held.index(tags.opening) + len(tags.opening)
            self.head, self._held = self._held[:at], self._held[at:]
            self.tags, self.closing = tags, tags.closing
            self.thinking = self._begun = True
            return
        in_channels = harmony.begins_reply(self._held)
        if in_channels and not self._may:
            self._held, self._begun = harmony.escape_marks(self._held), True
        elif in_channels:
            self._channels, self._begun = ToolChannels() if self._tools else harmony.Channels(), True
        elif in_channels is False and not thought_tags.may_begin(self._held):  # an empty start may become a tag too
            self._begun = True

    def _in_channels(self, channels: harmony.Channels) -> tuple[str, str]:
        parts, self._held = channels.push(self._held), ""
        self.head, self.thinking, self.closing = channels.head, channels.thinking, channels.closing
        return parts

    def _more_thought(self) -> str:
        """The final part of the thought; white space or half a tag at its end is held back."""
        at = self._held.find(self.closing)
        certain = self._held[:at] if at >= 0 else self._held[: len(self._held) - _beginning(self._held, self.closing)]
        piece = certain.rstrip()
        given = piece if self._thought else piece.lstrip("\n")
        self._thought = self._thought or bool(given)
        taken = len(piece) if at < 0 else at + len(self.closing)
        self.head += self._held[:taken]
        self._held, self.thinking = self._held[taken:], at < 0
        return given

    def _begin_answer(self) -> str:
        """The beginning of the answer, without the empty lines after a thought."""
        start = self._held.lstrip("\n") if self.head else self._held
        self.head += self._held[: len(self._held) - len(start)]
        self._held, self._answering = "", bool(start)
        return start


def thought_opening(tail: str) -> str:
    """Start of the reply at the end of a prompt: an opening tag and white space, or ""."""
    return thought_tags.opening_at_end(tail)


def split_reply(content: str) -> tuple[str, str]:
    """Return (thought, answer) of a stored reply."""
    splitter = ThoughtSplitter()
    pieces = splitter.push(content), splitter.finish()
    return "".join(thought for thought, _ in pieces), "".join(answer for _, answer in pieces)


def close_thought(content: str) -> str:
    """A stored reply in tags, with an unfinished thought closed, as most templates expect it."""
    content = content if harmony.begins_reply(content) is not True else _in_tags(content, THINK)
    splitter = ThoughtSplitter()
    splitter.push(content)
    return content.rstrip() + (splitter.tags or THINK).ending if splitter.thinking else content


def convert_for(template: str | None, content: str) -> str:
    """A stored reply in the form that this chat template uses, channels or its tags, to be continued.

    A reply in tags stays as it is for a template that mentions none.
    """
    if harmony.is_template(template):
        return content if harmony.has_form(template, content) else _in_channels(template, content)
    tags, own = thought_tags.of_template(template), thought_tags.begun_by(content)
    if harmony.begins_reply(content) is True:
        return _in_tags(content, tags or THINK)
    return content if own is None or tags in (None, own) else _in_tags(content, tags)


def _in_channels(template: str | None, content: str) -> str:
    return harmony.format_reply(template, *_parts(content))


def _in_tags(content: str, tags: Tags) -> str:
    thought, answer, is_open = _parts(content)
    if is_open:
        return tags.wrap(thought)
    return tags.wrap(thought) + tags.ending + answer if thought else answer


def _parts(content: str) -> tuple[str, str, bool]:
    """Thought and answer of a stored reply, and whether the thought has not ended."""
    splitter = ThoughtSplitter()
    pieces = splitter.push(content), splitter.finish()
    thought, answer = ("".join(each) for each in zip(*pieces, strict=True))
    return thought, answer, splitter.thinking


def template_message(tokenizer: TokenizerLike, role: str, content: str) -> dict[str, str]:
    """A stored message as the chat template takes it, with turn marks escaped: role and content.

    A thought is part of the content, or a field of its own where the template reads it there: some (Qwen3.8) read it
    nowhere else. Raises LocalqError as `Tokenizer.turn_marks`.
    """
    template, marks = tokenizer.chat_template, tokenizer.turn_marks
    if role != "assistant" or _THOUGHT_FIELD not in (template or ""):
        return {"role": role, "content": template_content(tokenizer, role, content)}
    thought, answer, _ = _parts(content)
    if harmony.is_template(template):
        thought, answer = map(harmony.escape_marks, (thought, answer))
    return {"role": role, "content": marks.escape(answer), _THOUGHT_FIELD: marks.escape(thought)}


def template_content(tokenizer: TokenizerLike, role: str, content: str) -> str:
    """Content of a stored message for the chat template, with turn marks escaped; for channels the answer only.

    Raises LocalqError as `Tokenizer.turn_marks`.
    """
    template, marks = tokenizer.chat_template, tokenizer.turn_marks
    if harmony.is_template(template):
        return marks.escape(harmony.escape_marks(split_reply(content)[1] if role == "assistant" else content))
    if role != "assistant":
        return marks.escape(content)
    return escape_reply(close_thought(convert_for(template, content)), marks)


def escape_reply(content: str, marks: TurnMarks) -> str:
    """A stored reply in tags with turn marks escaped, but not the tags of its thought, which may be marks as well."""
    splitter = ThoughtSplitter()
    splitter.push(content)
    splitter.finish()
    tags, head = splitter.tags, splitter.head
    if tags is None:
        return marks.escape(content)
    start = head.index(tags.opening) + len(tags.opening)
    end = len(head) if splitter.thinking else head.rindex(tags.closing)
    thought, answer = (marks.escape(each) for each in (head[start:end], content[len(head) :]))
    return head[:start] + thought + head[end:] + answer


def escape_continuation(tokenizer: TokenizerLike, content: str) -> str:
    """A stored reply in the template's form, to be continued, with marks in its text escaped."""
    marks = tokenizer.turn_marks
    if not harmony.is_template(tokenizer.chat_template):
        return escape_reply(content, marks)
    head, answer = harmony.split_answer(content)
    return head + marks.escape(harmony.escape_marks(answer))


def continue_prompt(prompt: str, begun: str) -> str:
    """Append the start of a stored reply to `prompt`; its thought replaces one that the prompt opens or has empty."""
    opening, bare = thought_opening(prompt), thought_tags.without_empty_thought(prompt)
    if thought_tags.begun_by(begun) is not None:
        return (prompt[: len(prompt) - len(opening)] if bare is None else bare) + begun
    opened = thought_tags.begun_by(opening)
    return prompt + (opened.ending if opened else "") + begun


def minimal_variables(template: str | None) -> dict[str, Any]:
    """Variables of a chat template for as little thinking as possible."""
    text = template or ""
    if thinking_levels.can_switch_off(text):
        return _switched(text, on=False)
    found = thinking_levels.levels(text)
    return {thinking_levels.variable(text): found[0]} if found else {}


def validate(think: str) -> str:
    """Return `think`. Raises LocalqError (exit 2) where it is not in THINK_CHOICES."""
    if think not in THINK_CHOICES:
        raise usage_error("think", f"invalid value '{think}'", f"Use one of {', '.join(THINK_CHOICES)}.")
    return think


def variables(template: str | None, think: str) -> dict[str, Any]:
    """Variables of a chat template for thinking "auto" (none: the model's default), "on", "off" or a level.

    Raises LocalqError (exit 2) where the template has no such mode, naming those that it has.
    """
    if think == "auto":
        return {}
    text = template or ""
    switch, levels = thinking_levels.switch(text) is not None, thinking_levels.levels(text)
    if think in levels:
        return {thinking_levels.variable(text): think, **_switched(text, on=True)}
    if think in THINK_LEVELS and levels:
        why = f"this model supports only {listing(levels, 'and')}"
        raise usage_error(f"think {think}", why, f"Use --think {listing(levels, 'or')}.")
    if think in THINK_LEVELS:
        step = "Use --think or --no-think." if switch else "Remove --think."
        raise usage_error(f"think {think}", "this model has no thinking levels", step)
    if think == "on" and switch:
        return _switched(text, on=True)
    if think == "off" and thinking_levels.can_switch_off(text):
        return _switched(text, on=False)
    always = switch or bool(levels) or thought_tags.of_template(text) is not None
    if think == "on" and always:
        return {}  # this model always thinks
    if levels or switch:
        step = f"The minimum is --think {levels[0]}." if levels else "Limit thinking with --think-budget."
        raise usage_error("think off", "this model always thinks", step)
    raise usage_error(f"think {think}", "this model has no thinking mode", "Remove --think.")


def _switched(text: str, on: bool) -> dict[str, Any]:
    """The variable of the switch for thinking, {} for a template without one."""
    if (found := thinking_levels.switch(text)) is None:
        return {}
    name, *values = found
    return {name: values[0 if on else 1]}


def preservation(template: str | None, choice: str) -> dict[str, Any]:
    """Variables of a chat template for thoughts of earlier replies: kept ("on"), left out, or "auto" (its default).

    Raises LocalqError (exit 2) where the template has no such choice.
    """
    if choice == "auto":
        return {}
    if _PRESERVE not in (template or ""):
        why = "this model's chat template does not support this option"
        raise usage_error(f"{_PRESERVE} {choice}", why, "Use auto.")
    return {_PRESERVE: choice == "on"}


def _beginning(text: str, closing: str) -> int:
    """Length of the longest end of `text` that may begin the closing tag."""
    return next((size for size in range(len(closing) - 1, 0, -1) if text.endswith(closing[:size])), 0)
