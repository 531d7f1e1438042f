"""Channels of gpt-oss replies, in OpenAI's "harmony" format, and those of Muse Glimmer, where the recipient decides.

reply     messages after `<|start|>assistant`, which is in the prompt: HEADER <|message|> text, with <|end|><|start|>
          between two. A header is `<|channel|>NAME`, optionally with a recipient (`to=functions.NAME`, also before the
          channel) and a type (`<|constrain|>json`)
thought   every message but the answer: `analysis`, `commentary` (tool calls and the text before them; localq offers
          no tools), and unknown channels
answer    the first message of the channel `final`, or one without channel and recipient. Marks in it are plain text,
          such as in an explanation of this format
Muse      has no channels: a message ` to=self` is a thought, ` to=user` the answer; <|eom|> ends a message, <|eot|> all
stored    the raw text, which a prompt can continue exactly. A `<|` that the model wrote as text in a thought gets a
          zero-width space, so that only marks are marks

Format: the published chat template of openai/gpt-oss-120b, and OpenAI's articles/openai-harmony.md. The package
`openai-harmony` is not used: it adds 8 MB of Rust and pydantic, and reads only ids of its own vocabulary, which it
downloads on first use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from localq.text.tokenizer_like import TokenizerLike

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
LAST = "<|return|>"  # ends the reply
MUSE_END, MUSE_LAST = "<|eom|>", "<|eot|>"
MARKS = (START, CHANNEL, MESSAGE, END, "<|constrain|>", "<|call|>", LAST, MUSE_END, MUSE_LAST)
FINAL = f"{CHANNEL}final{MESSAGE}"
_NEXT = f"{END}{START}assistant"  # between two messages
_FIRST = (CHANNEL, START, MESSAGE)  # a reply in this format begins with one of these
_TO = "to="
_LEAD = re.compile(rf"\s*(?:{_TO}[^\s<]{{0,200}}\s*)?")
_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
_RECIPIENT = re.compile(_TO + r"([^\s<]*)")
_TO_SELF, _TO_USER = f" {_TO}self{MESSAGE}", f" {_TO}user{MESSAGE}"
BROKEN = "<\u200b|"  # replaces <| where it is not a mark


def is_template(template: str | None) -> bool:
    """Return whether a model with this chat template uses channels, or recipients in their place."""
    text = template or ""
    return all(mark in text for mark in (START, MESSAGE)) and (CHANNEL in text or f"{_TO}self" in text)


def answer_opening(template: str | None) -> str:
    """Return the opening of an answer, in a reply to a prompt of this template; "" without channels."""
    if not is_template(template):
        return ""
    return FINAL if CHANNEL in (template or "") else _TO_USER


def following(template: str | None) -> str:
    """Return the text between two messages of a reply, in channels or recipients as this template has them."""
    return _NEXT if CHANNEL in (template or "") else f"{MUSE_END}{START}assistant"


def has_form(template: str | None, content: str) -> bool:
    """Return whether a stored reply is in channels as this template has them."""
    header = content.partition(MESSAGE)[0]
    is_other = CHANNEL not in header and _TO in header if CHANNEL in (template or "") else CHANNEL in header
    return begins_reply(content) is True and not is_other


def begins_reply(text: str) -> bool | None:
    """Return whether `text` begins a reply in channels; None: too short to know."""
    lead = _LEAD.match(text)
    rest = text[lead.end() :] if lead else text
    if any(rest.startswith(mark) for mark in _FIRST):
        return True
    return None if any(mark.startswith(rest) for mark in (*_FIRST, _TO)) else False


def is_answer(header: str) -> bool:
    """Return whether the message with this header, up to its `<|message|>`, is the answer."""
    name, recipient = _NAME.search(header), _RECIPIENT.search(header)
    return (name is None or name[1] == "final") and (recipient is None or recipient[1] == "user")


def escape_marks(text: str) -> str:
    """`text` with channel marks escaped: the template refuses them in messages, or takes them for its own."""
    for mark in MARKS:
        text = text.replace(mark, BROKEN + mark[2:])
    return text


def split_answer(content: str) -> tuple[str, str]:
    """A stored reply up to its answer, and the answer; all of a reply that is not in channels is its answer."""
    if begins_reply(content) is not True:
        return "", content
    channels = Channels()
    _, answer = channels.push(content)
    return content[: len(content) - len(answer)], answer


def format_reply(template: str | None, thought: str, answer: str, thinking: bool) -> str:
    """A reply in the channels of this template, to be continued. thinking: the thought has not ended."""
    has_channels = CHANNEL in (template or "")
    opening = f"{CHANNEL}analysis{MESSAGE}" if has_channels else _TO_SELF
    start = opening + escape_marks(thought) if thought or thinking else ""
    return start if thinking else f"{start}{following(template) if start else ''}{answer_opening(template)}{answer}"


class Channels:
    """Text in, (thought, answer) out, as `thinking.ThoughtSplitter`; an empty line between messages of a thought."""

    def __init__(self) -> None:
        self.closing = FINAL  # the mark that begins the answer
        self.head, self.thinking = "", True
        self._held = self._header = ""
        self._in_header = True
        self._given = self._parted = False  # part of the thought was returned; part of an earlier message

    @property
    def in_header(self) -> bool:
        """True while the last message has no text yet: its header is not complete."""
        return self._in_header and self.thinking

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return what is final now of thought and answer."""
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
        """The answer, once it has begun."""
        answer = "" if self.thinking else self._held
        self._held = self._held[len(answer) :]
        return answer

    def finish(self) -> tuple[str, str]:
        """End the reply; return the held text, without an unfinished header."""
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
            self.closing = _TO_USER if CHANNEL not in header and _TO in header else FINAL
            self._parted = self._given

    def _more_thought(self) -> str:
        places = [place for mark in MARKS if (place := self._held.find(mark)) >= 0]
        taken = min(places, default=len(self._held) - unfinished(self._held))
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
    """Ids in, text with channel marks out; only special tokens become marks.

    over   the answer has ended, whatever follows
    """

    def __init__(
        self, tokenizer: TokenizerLike, begun: str = "", before: Sequence[int] = (), tools: bool = False
    ) -> None:
        """begun: start of the reply in the prompt; before: the last ids of that prompt.

        tools: messages may follow the answer, so marks in it are escaped as they are in a thought (`tools.channels`).
        """
        self._tokenizer, self._marks, self._tools = tokenizer, tokenizer.mark_ids, tools
        self.over = False
        self._lead = ""  # text of a reply whose form is not known yet
        self._header: str | None = None  # of the current message; None: in its text
        self._thought, self._begun, self._framed = False, bool(begun), begins_reply(begun) is True
        self._last = ""
        self._new()
        if begun:
            self._go_on(begun, before)

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that is final now."""
        return "".join(self._one(id) for id in ids if not self.over)

    def finish(self) -> str:
        """End the reply; return the held text."""
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
        """A mark between messages; in an answer it is its end. A reply that began with text has no marks."""
        if self._begun and not self._framed:
            return ""
        if self._framed and self._header is None and not self._thought and not self._tools:
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
        elif self._thought or (self._tools and self._framed):
            return self._unmarked(text)
        return text

    def _unmarked(self, text: str) -> str:
        """`text` of a thought, with what looks like a mark escaped."""
        if not text:
            return ""
        broken = text.replace("<|", BROKEN)
        if self._last == "<" and text[0] == "|":
            broken = BROKEN[1:-1] + broken
        self._last = text[-1]
        return broken


def unfinished(text: str) -> int:
    """Length of the longest end of `text` that may begin a mark."""
    longest = max(map(len, MARKS)) - 1
    return next((size for size in range(longest, 0, -1) if any(each.startswith(text[-size:]) for each in MARKS)
                 and size <= len(text)), 0)  # fmt: skip
