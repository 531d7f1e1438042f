"""Thinking state of a reply, token by token, and the text that ends the thought: for a thinking budget.

The reply is read as a front end reads it (`thinking`, `harmony`), so both agree on what is thought and what is answer.
An ending is the plain closing tag, or for channels the end of the message and the opening of the answer. vLLM and
llama.cpp end a thought so by default: no word that the model did not write gets into its reply. Qwen's models are the
exception: their report describes a sentence for it, which their training makes them follow, and without which they
often go on thinking in the answer (Qwen3 technical report, section 4.7, and Qwen's documentation of thinking budgets).
"""

from __future__ import annotations

from collections.abc import Sequence

from localq.text import harmony, thinking
from localq.text.thinking import ThoughtSplitter
from localq.text.thought_tags import THINK, Tags
from localq.text.tokenizer_like import DetokenizerLike, TokenizerLike

_QWEN = "last_query_index"  # a variable of the templates of Qwen3 and newer, and of no other family
_QWEN_ENDING = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
)
_LONGEST_CHARACTER = 4  # bytes, and so tokens
_LONGEST_HEADER = 32  # tokens of a channel's header; a longer one is none


class ThoughtState:
    """Ids of one reply in; where its thought stands.

    used       tokens of the thought so far, without tags and headers
    over       the answer has begun: no thought follows
    thinking   the last token was part of the thought, or opened it
    """

    def __init__(self, tokenizer: TokenizerLike, prompt: Sequence[int], begun: str = "") -> None:
        """prompt: token ids, which may end with the start of the reply: `begun`, or an opened thought."""
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template
        self._recent: list[int] = []  # the last tokens of the reply
        self._tail, self._header = "", 0  # last character of the reply; tokens of a header that is not complete
        last = list(prompt[-thinking.TAIL_TOKENS :])
        self._in_channels = harmony.is_template(self._template)
        if self._in_channels:
            self._detokenizer: DetokenizerLike = harmony.ChannelDetokenizer(tokenizer, begun, last)
            opened = ""
        else:
            self._detokenizer = tokenizer.stream()
            opened = "" if begun else thinking.thought_opening(tokenizer.decode(last))
            if begun:
                self._detokenizer.push(last)
        self._splitter = ThoughtSplitter(opened, channels=self._in_channels)
        thought = self._splitter.push(begun.rstrip("\ufffd"))[0] if begun else ""
        self.used = len(tokenizer.encode(thought)) if thought else 0
        self._tail = (begun or opened)[-1:]

    @property
    def over(self) -> bool:
        """True once the answer has begun."""
        return self._splitter.over

    @property
    def thinking(self) -> bool:
        """True while a thought has begun and not ended; of channels, the text of a message, not its header."""
        return self._splitter.thinking and not self._splitter.in_header

    def push(self, id: int) -> None:
        """Add a token of the reply."""
        counts = self.thinking
        text = self._detokenizer.push([id])
        self._splitter.push(text)
        self._recent = [*self._recent[1 - _LONGEST_CHARACTER :], id]
        self._tail = text[-1:] or self._tail
        self.used += counts and not self.over
        self._header = self._header + 1 if self._splitter.in_header and not self.over else 0

    def can_end(self) -> bool:
        """Return whether `ending` may follow now: not within a character or a header."""
        if self._in_channels and not self._recent and not self.thinking:
            return not self.over  # nothing is written yet: the answer opens at once
        if not self.thinking:
            return self._header > _LONGEST_HEADER
        return not self._tokenizer.decode(self._recent).endswith("\ufffd")

    def ending(self) -> str:
        """The text that ends the thought, or opens the answer of a reply in channels that has not begun."""
        if self._in_channels:
            opening = harmony.answer_opening(self._template)
            return opening if not self._recent and not self.thinking else harmony.following(self._template) + opening
        tags = self._splitter.tags or THINK
        return self._before(tags) + tags.closing

    def _before(self, tags: Tags) -> str:
        if tags is THINK and _QWEN in (self._template or ""):
            return _QWEN_ENDING
        return "" if self._tail == "\n" else tags.inside
