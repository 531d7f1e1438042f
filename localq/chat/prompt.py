"""The prompt of a conversation: system prompt, summary and newest turns as token ids.

When the context is full, the oldest exchanges are left out (`fit`). Knows neither the engine nor how conversations are
saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localq.chat.history.conversation import Conversation, Message, with_summary
from localq.chat.history.tool_rounds import ToolRound
from localq.errors import LocalqError, usage_error
from localq.text import harmony, template, thinking
from localq.text.tokenizer_like import TokenizerLike
from localq.text.tools.declaration import Tool

if TYPE_CHECKING:
    from localq.text.tools.format import ToolFormat

ROOM = 1 / 16  # share of the context for the reply, at most max_tokens; below 1 - WARNING, so the warning is first
TARGET = 3 / 4
TOO_LONG = "message"  # what an error about a message that does not fit names
WARNING = 0.9  # share of the context at which the user is warned


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, and how many of the oldest exchanges it leaves out."""

    ids: list[int]
    left_out: int


def fit(
    prompt: Callable[[int], list[int] | None], exchanges: int, left_out: int, size: int, max_tokens: int | None
) -> Prompt:
    """The prompt for a context of `size` tokens.

    prompt(n): the ids without the oldest n of `exchanges`, or None where that is too long to be tokenized.
    left_out: how many the last prompt left out. The number stays while it suffices, which keeps the KV cache valid,
    unless the prompt has shrunk to half of TARGET. Raises LocalqError (exit 2) where the last message is too long.
    """
    room = max(1, min(max_tokens or size, int(size * ROOM)))
    ids = prompt(left_out)
    enough = ids is not None and len(ids) + room <= size
    best = Prompt(ids, left_out) if ids is not None and enough else None
    if best is not None and (not left_out or len(best.ids) > size * TARGET / 2):
        return best
    low, high = (0, left_out - 1) if enough else (left_out + 1, exchanges)  # the smallest that suffices is here
    while low <= high:
        middle = (low + high) // 2
        ids = prompt(middle)
        if ids is not None and len(ids) <= size * TARGET:
            best, high = Prompt(ids, middle), middle - 1
        else:
            low = middle + 1
    if best is not None:
        return best
    ids = prompt(exchanges)
    if ids is None or len(ids) >= size:
        has = f"{len(ids)} tokens" if ids is not None else "far too many tokens"
        why = f"too long for the {size}-token context ({has}, including the system prompt)"
        raise usage_error(TOO_LONG, why, "Send a shorter message, or use a larger context (--ctx).")
    return Prompt(ids, exchanges)


def marks(tokenizer: TokenizerLike, prompt: Sequence[int]) -> list[int]:
    """Lengths of a prompt that a later one is likely to share: behind its first message, and before the reply.

    Where the template writes no end of a message of the user, behind the last reply.
    """
    framing = {id for id, mark in tokenizer.mark_ids.items() if mark in (harmony.END, harmony.MUSE_END)}
    ends = framing | tokenizer.stop_ids
    found = [place for place, id in enumerate(prompt, 1) if id in ends]
    return sorted({found[0], found[-1]}) if found else []


def omission_notice(prompt: Prompt, left_out: int, in_chat: bool = True) -> str:
    """A notice where `prompt` leaves out more or fewer exchanges than `left_out`, the number before; else empty.

    in_chat: it may name commands of a chat.
    """
    if prompt.left_out == left_out:
        return ""
    if prompt.left_out < left_out:
        again = left_out - prompt.left_out
        which = "an older exchange fits" if again == 1 else f"{again} older exchanges fit"
        return f"{which} in the context again; the prompt is reprocessed from there"
    oldest = "exchange is" if prompt.left_out == 1 else f"{prompt.left_out} exchanges are"
    advice = ". /compact replaces the oldest turns with a summary instead" if in_chat else ""
    return (
        f"the context is full: the oldest {oldest} left out of the prompt (not deleted), and the rest is "
        f"reprocessed{advice}"
    )


def fill_warning(used: int, size: int, in_chat: bool = True) -> str:
    """A warning that the context is nearly full. in_chat: it may name commands of a chat."""
    advice = (
        ". When it is full, the oldest turns are left out of the prompt; /compact replaces them with a summary, "
        "and /clear starts over"
    )
    return f"the context is {used / size:.0%} full ({used} of {size} tokens){advice if in_chat else ''}"


FRAME_BYTES = 64  # upper bound of what a template writes around a message


@dataclass(frozen=True)
class ExactIds:
    """Ids of a reply as the engine sent them, and its place; valid in a prompt with the same `think` only."""

    conversation: Conversation
    reply: int
    think: str
    ids: list[int]


@dataclass
class PromptBuilder:
    """Builds the prompts of one chat.

    first    oldest turn in the prompt where older ones are left out; kept while it can be, so that the KV cache stays
             valid. None: nothing is left out
    exact    ids of the last reply
    preserve thoughts of earlier replies in the prompt: "on", "off", or "auto" (the model's default)
    tools    that the model may call; none where its chat template has no tools
    """

    tokenizer: TokenizerLike
    first: int | None = None
    exact: ExactIds | None = None
    preserve: str = "auto"
    tools: tuple[Tool, ...] = ()

    @functools.cached_property
    def tool_format(self) -> ToolFormat | None:
        """Tool-call format of the model; None if its chat template has none."""
        from localq.text.tools.formats import tool_format  # start-up cost: most chats have no tools

        return tool_format(self.tokenizer.chat_template)

    def messages(self, conversation: Conversation) -> list[Message]:
        """Messages of the path to the head. Raises LocalqError (exit 2) where the summary is all there is."""
        summary, turns = conversation.model_context()
        if summary is not None and not turns:
            raise usage_error("the prompt", "there is no message after the summary yet", "Send a message first.")
        return messages_of(conversation, turns[2 * self._left_out(turns) :])

    def text(self, messages: Sequence[Message], think: str) -> str:
        """These messages as the template renders them, with special tokens, up to where the answer begins."""
        return self.tokenizer.chat_text(self._dicts(messages), **self._variables(think))

    def ids(self, messages: Sequence[Message], think: str) -> list[int]:
        """Token ids of `text`."""
        return self.tokenizer.chat_ids(self._dicts(messages), **self._variables(think))

    def _dicts(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages for the template. One without tools gets the text after the last calls only."""
        if not any(each.rounds for each in messages) or self.tool_format is None:
            return [each.to_dict(self.tokenizer) for each in messages]
        dicts = [part for each in messages for part in each.to_dicts(self.tokenizer)]
        has_calls = any("tool_calls" in each for each in dicts)
        return self.tool_format.messages(dicts, self.tokenizer.turn_marks.escape) if has_calls else dicts

    def _variables(self, think: str) -> dict[str, Any]:
        template = self.tokenizer.chat_template
        found = thinking.variables(template, think) | thinking.preservation(template, self.preserve)
        if self.tools and self.tool_format is not None:
            found |= self.tool_format.variables(self.tools, self.tokenizer.turn_marks.escape)
        return found

    def reply_start(
        self, conversation: Conversation, reply: int | None, think: str, bound: bool = False
    ) -> tuple[str, list[int]]:
        """The text of a reply to be continued, and its ids where they are known exactly.

        With think "off" an unfinished thought is closed. bound: a grammar constrains the answer, so for a model with
        channels the prompt opens the answer's channel.
        """
        if reply is None:
            return (harmony.answer_opening(self.tokenizer.chat_template) if bound else ""), []
        content, known = conversation.turns[reply].message.content, self.exact
        if think == "off" and (ended := thinking.close_thought(content)) != content:
            return ended, []
        if known is None or known.conversation is not conversation or (known.reply, known.think) != (reply, think):
            return thinking.convert_for(self.tokenizer.chat_template, content), []
        return content, known.ids

    def ids_with_start(self, messages: Sequence[Message], think: str, begun: str, exact: list[int]) -> list[int]:
        """`ids` followed by the reply to be continued: its exact ids, else those of its text."""
        if not begun or exact:
            return [*self.ids(messages, think), *exact]
        begun = thinking.escape_continuation(self.tokenizer, begun)
        return self.tokenizer.encode(thinking.continue_prompt(self.text(messages, think), begun))

    def fit(
        self, conversation: Conversation, ids: Callable[[list[Message]], list[int]], size: int, max_tokens: int | None,
        in_chat: bool = True, rounds: tuple[ToolRound, ...] = (),
    ) -> tuple[list[int], str]:  # fmt: skip
        """`ids` of the newest turns of the path that fit into `size` tokens, and a notice about those left out.

        rounds: tool calls of the reply that is being made, which follow the last message of the user
        """
        so_far = [Message("assistant", "", rounds=rounds)] if rounds else []
        _, turns = conversation.model_context()
        before = self._left_out(turns)

        def without(left_out: int) -> list[int] | None:
            messages = [*messages_of(conversation, turns[2 * left_out :]), *so_far]
            length = sum(each.size_bytes + FRAME_BYTES * each.parts for each in messages)
            return ids(messages) if length <= template.MAX_CONVERSATION_BYTES else None

        try:
            found = fit(without, len(turns) // 2, before, size, max_tokens)
        except LocalqError as error:
            if not rounds or error.what != TOO_LONG:
                raise
            step = "Use a larger context (--ctx), or set mcp_result to a smaller number."
            raise usage_error("tool results", error.why, step) from None
        self.first = turns[2 * found.left_out] if found.left_out else None
        return found.ids, omission_notice(found, before, in_chat)

    def _left_out(self, turns: list[int]) -> int:
        """Exchanges at the beginning of `turns` that the prompt leaves out."""
        return turns.index(self.first) // 2 if self.first is not None and self.first in turns else 0


def messages_of(conversation: Conversation, turns: Sequence[int]) -> list[Message]:
    """The system prompt and these turns, with the summary of earlier turns in the first message of the user."""
    system = [Message("system", conversation.system)] if conversation.system else []
    messages = [conversation.turns[turn].message for turn in turns]
    summary, _ = conversation.model_context()
    if messages and summary is not None:
        messages[0] = Message(messages[0].role, with_summary(summary.text, messages[0].content))
    return system + messages
