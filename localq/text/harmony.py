"""The channels of gpt-oss: what a reply in OpenAI's "harmony" format says to whom. Torch-free.

reply     messages behind `<|start|>assistant`, which the prompt has: HEADER <|message|> text, with <|end|><|start|>
          between two. A header is `<|channel|>NAME`, perhaps with a recipient (`to=functions.NAME`, in front of the
          channel too) and a type (`<|constrain|>json`)
thought   every message but the answer: `analysis`, `commentary` (a call of a tool, and what is said before one; localq
          offers no tools), and channels that are not known
answer    the first message of the channel `final`, or without a channel and a recipient. Marks in it are plain text:
          what a model explains of this format is no message of its own
stored    the raw text, which the prompt goes on with to the letter. A `<|` that the model wrote as text in a thought
          has a zero-width space in it, so that only marks are marks

Format: the published chat template of openai/gpt-oss-120b, and OpenAI's articles/openai-harmony.md. The package
`openai-harmony` is not used: 8 MB of Rust beside pydantic, for a format that is read here in two pages; and it reads
ids of its own vocabulary only, which it fetches from another host when first used, where the model's own files are
here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
MARKS = (START, CHANNEL, MESSAGE, END, "<|constrain|>", "<|call|>", "<|return|>")
FINAL = f"{CHANNEL}final{MESSAGE}"
_NEXT = f"{END}{START}assistant"  # ends a message and begins another
_FIRST = (CHANNEL, START, MESSAGE)  # one of which a reply in this format begins with
_TO = "to="
_LEAD = re.compile(rf"\s*(?:{_TO}[^\s<]{{0,200}}\s*)?")
_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
_BROKEN = "<\u200b|"  # of a text that is no mark


class Detokenizer(Protocol):
    """What is needed of `tokenizer.Detokenizer`."""

    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class Tokenizer(Protocol):
    """What is needed of `tokenizer.Tokenizer`. mark_ids: id -> the one of `MARKS` that it is."""

    @property
    def mark_ids(self) -> dict[int, str]: ...
    def stream(self) -> Detokenizer: ...


def is_template(template: str | None) -> bool:
    """Does the model with this chat template speak in channels?"""
    return all(mark in (template or "") for mark in (START, CHANNEL, MESSAGE))


def begins_reply(text: str) -> bool | None:
    """Is `text` the beginning of a reply in channels? None = more of it must come."""
    lead = _LEAD.match(text)
    rest = text[lead.end() :] if lead else text
    if any(rest.startswith(mark) for mark in _FIRST):
        return True
    return None if any(mark.startswith(rest) for mark in (*_FIRST, _TO)) else False


def is_answer(header: str) -> bool:
    """Is the message with this header, up to its `<|message|>`, for the user?"""
    name = _NAME.search(header)
    return (name is None or name[1] == "final") and _TO not in header


def escape_marks(text: str) -> str:
    """`text` for a template of this kind, which refuses marks in what was said, or would take them for its own."""
    for mark in MARKS:
        text = text.replace(mark, _BROKEN + mark[2:])
    return text


def continuation(content: str) -> str:
    """A stored reply as it is put behind a prompt, to go on with: marks in its answer are plain text there too."""
    if begins_reply(content) is not True:
        return content
    channels = Channels()
    _, answer = channels.push(content)
    return content[: len(content) - len(answer)] + escape_marks(answer)


def format_reply(thought: str, answer: str, thinking: bool) -> str:
    """A reply in channels, to go on with. thinking: the thought goes on."""
    said = f"{CHANNEL}analysis{MESSAGE}{escape_marks(thought)}" if thought or thinking else ""
    return said if thinking else f"{said}{_NEXT if said else ''}{FINAL}{answer}"


class Channels:
    """Text in, (thought, answer) out, as `thinking.Splitter` does. Messages of a thought have an empty line between."""

    closing = FINAL

    def __init__(self) -> None:
        self.head, self.thinking = "", True
        self._held = self._header = ""
        self._in_header = True
        self._given = self._parted = False  # something of the thought was given out; something of another message

    def push(self, text: str) -> tuple[str, str]:
        """What is certain now of the thought, and of the answer behind it."""
        if not self.thinking:
            return "", text
        self._held += text
        return self._thoughts(), self._rest()

    def _thoughts(self) -> str:
        thought = ""
        while self._held and self.thinking:
            before = len(self._held), self._in_header
            if self._in_header:
                self._read_header()
            else:
                thought += self._more_thought()
            if (len(self._held), self._in_header) == before:
                break
        return thought

    def _rest(self) -> str:
        """The answer, if it is there."""
        answer = "" if self.thinking else self._held
        self._held = self._held[len(answer) :]
        return answer

    def finish(self) -> tuple[str, str]:
        """What was held back; the reply is over. Half a header is no part of it."""
        held, self._held = self._held, ""
        if self._in_header or not self.thinking:
            return "", ""
        self.head += held
        return self._apart(held), ""

    def _read_header(self) -> None:
        header, mark, rest = self._held.partition(MESSAGE)
        if mark:
            self.head, self._held, self._in_header = self.head + header + mark, rest, False
            self.thinking = not is_answer(header)
            self._parted = self._given

    def _more_thought(self) -> str:
        places = [place for mark in MARKS if (place := self._held.find(mark)) >= 0]
        taken = min(places, default=len(self._held) - _unfinished(self._held))
        text, self._held = self._held[:taken], self._held[taken:]
        self.head += text
        self._in_header = bool(places)
        return self._apart(text)

    def _apart(self, text: str) -> str:
        if not text:
            return ""
        gap = "\n\n" if self._parted else ""
        self._given, self._parted = True, False
        return gap + text


class ChannelDetokenizer:
    """Ids in, text out, with the marks of a model that speaks in channels: only tokens are marks.

    over   the answer has ended, whatever comes
    """

    def __init__(self, tokenizer: Tokenizer, begun: str = "", before: Sequence[int] = ()) -> None:
        """begun: the text of the reply that the prompt has already; before: the last ids of the prompt then."""
        self._tokenizer, self._marks = tokenizer, tokenizer.mark_ids
        self.over = False
        self._lead = ""  # of a reply of which it is not known what it begins with
        self._header: str | None = None  # of the message that begins; None = in its text
        self._thought, self._begun, self._framed = False, bool(begun), begins_reply(begun) is True
        self._last = ""
        self._new()
        if begun:
            self._go_on(begun, before)

    def push(self, ids: Sequence[int]) -> str:
        """Text that is certain now."""
        return "".join(self._one(id) for id in ids if not self.over)

    def finish(self) -> str:
        """What was held back; the reply is over."""
        lead, self._lead = self._lead, ""
        return "" if self.over else lead + self._text(self._inner.finish())

    def _new(self) -> None:
        self._inner = self._tokenizer.stream()

    def _go_on(self, begun: str, before: Sequence[int]) -> None:
        channels = Channels()
        if self._framed:
            channels.push(begun)
            self._thought = channels.thinking
            last = max(begun.rfind(mark) for mark in MARKS)
            self._header = begun[last:] if channels.thinking and not begun.startswith(MESSAGE, last) else None
        first = next((at for at in range(len(before), 0, -1) if before[at - 1] in self._marks), 0)
        self._inner.push(before[first:])

    def _one(self, id: int) -> str:
        mark = self._marks.get(id)
        return self._text(self._inner.push([id])) if mark is None else self._mark(mark)

    def _mark(self, mark: str) -> str:
        """Between messages; in an answer the end of it. A reply that began with text has no marks."""
        if self._begun and not self._framed:
            return ""
        if self._framed and self._header is None and not self._thought:
            self.over = True
            return self._inner.finish().rstrip("\ufffd")
        held = self._text(self._inner.finish().rstrip("\ufffd"))
        self._new()
        header = (self._header or "") + self._lead + mark
        out, self._lead = self._lead + held + mark, ""
        self._begun = self._framed = True
        self._header = None if mark == MESSAGE else header
        self._thought = not is_answer(header.removesuffix(MESSAGE))
        self._last = ""
        return out

    def _text(self, text: str) -> str:
        if not self._begun:
            self._lead += text
            if begins_reply(self._lead) is None:
                return ""
            text, self._lead, self._begun = self._lead, "", True
        if self._header is not None:
            self._header += text
        elif self._thought:
            return self._unmarked(text)
        return text

    def _unmarked(self, text: str) -> str:
        """`text` of a thought, in which nothing looks like a mark."""
        if not text:
            return ""
        broken = text.replace("<|", _BROKEN)
        if self._last == "<" and text[0] == "|":
            broken = _BROKEN[1:-1] + broken
        self._last = text[-1]
        return broken


def _unfinished(text: str) -> int:
    """Characters at the end of `text` that may be the beginning of a mark: the longest such end."""
    longest = max(map(len, MARKS)) - 1
    return next((size for size in range(longest, 0, -1) if any(each.startswith(text[-size:]) for each in MARKS)
                 and size <= len(text)), 0)  # fmt: skip
