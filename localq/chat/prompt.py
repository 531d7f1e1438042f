"""What the model reads of a conversation: the system prompt, the summary of what was compacted, and the newest turns.

Turns to a template's messages to token ids, and which of the oldest turns are left out where the context is full
(`overflow.py`). Torch-free; knows neither the engine nor how conversations are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from localq.chat.history.conversation import Conversation, Message, with_summary
from localq.errors import usage_error
from localq.text import harmony, template, thinking

ROOM = 1 / 16  # of the context, for the reply; less where replies are limited to less. Below 1 - WARNING: told first
TARGET = 3 / 4
WARNING = 0.9  # share of the context at which the user is told, before it is full


@dataclass(frozen=True)
class Prompt:
    """Token ids of what the model reads, and how many of the oldest exchanges are not among it."""

    ids: list[int]
    left_out: int


def fit(
    prompt: Callable[[int], list[int] | None], exchanges: int, left_out: int, size: int, max_tokens: int | None
) -> Prompt:
    """The prompt for a context of `size` tokens.

    prompt(n): the ids without the oldest n of `exchanges`, or None where that is far too long to be tokenized.
    left_out: how many were left out last time; as long as those are enough they stay the same, which keeps the KV
    cache, unless what is read has shrunk to half of TARGET. Raises LocalqError (exit 2) where not even the last message
    alone fits.
    """
    room = max(1, min(max_tokens or size, int(size * ROOM)))
    ids = prompt(left_out)
    enough = ids is not None and len(ids) + room <= size
    best = Prompt(ids, left_out) if ids is not None and enough else None
    if best is not None and (not left_out or len(best.ids) > size * TARGET / 2):
        return best
    low, high = (0, left_out - 1) if enough else (left_out + 1, exchanges)  # the fewest that are enough lie here
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
        has = f"{len(ids)} tokens" if ids is not None else "far more tokens than that"
        why = f"the context holds {size} tokens, and with the system prompt it has {has}"
        raise usage_error("the message", why, "Send less, or use a larger context (--ctx).")
    return Prompt(ids, exchanges)


def omission_notice(prompt: Prompt, left_out: int) -> str:
    """What to tell when `prompt` leaves out other exchanges than the `left_out` before; empty where it does not."""
    if prompt.left_out == left_out:
        return ""
    if prompt.left_out < left_out:
        again = left_out - prompt.left_out
        which = "an older exchange fits" if again == 1 else f"{again} older exchanges fit"
        return f"{which} into the context again: the model reads everything from there on anew"
    oldest = "exchange is" if prompt.left_out == 1 else f"{prompt.left_out} exchanges are"
    return (
        f"the context is full: the oldest {oldest} no longer read by the model, which reads the rest again; "
        "the conversation itself keeps them. /compact sums the oldest up instead"
    )


def fill_warning(used: int, size: int) -> str:
    """That the context will soon be full."""
    return (
        f"the context is {used / size:.0%} full ({used} of {size} tokens): when it is full, the model "
        "reads only the system prompt and the newest turns; /compact sums the oldest up, /clear starts anew"
    )


FRAME_BYTES = 64  # that a template writes around a message: few write as many


class Tokenizer(Protocol):
    """What is needed of `tokenizer.Tokenizer`."""

    @property
    def chat_template(self) -> str | None: ...
    def chat_ids(self, messages: Sequence[dict[str, str]], **variables: Any) -> list[int]: ...
    def chat_text(self, messages: Sequence[dict[str, str]], **variables: Any) -> str: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class ExactIds:
    """The ids of a reply as they came, and where it is; they stand behind a prompt for the same `think` only."""

    conversation: Conversation
    reply: int
    think: str
    ids: list[int]


@dataclass
class PromptBuilder:
    """The state of it. exact: of the last reply.

    first    the oldest turn that is read, where older ones are left out; it stays the same as long as it can, which
             keeps the KV cache. None = nothing is left out
    """

    tokenizer: Tokenizer
    first: int | None = None
    exact: ExactIds | None = None

    def messages(self, conversation: Conversation) -> list[Message]:
        """Of the path to the head. Raises LocalqError (exit 2) where that ends with what was summed up."""
        summary, turns = conversation.model_context()
        if summary is not None and not turns:
            raise usage_error("the prompt", "nothing was said behind the summary yet", "Say something first.")
        return messages_of(conversation, turns[2 * self._left_out(turns) :])

    def text(self, messages: Sequence[Message], think: str) -> str:
        """These messages as the template writes them, special tokens too, up to where the model answers."""
        return self.tokenizer.chat_text(self._told(messages), **self._variables(think))

    def ids(self, messages: Sequence[Message], think: str) -> list[int]:
        """Token ids of `text`."""
        return self.tokenizer.chat_ids(self._told(messages), **self._variables(think))

    def _told(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        return [each.to_dict(self.tokenizer.chat_template) for each in messages]

    def _variables(self, think: str) -> dict[str, Any]:
        return thinking.variables(self.tokenizer.chat_template, think)

    def reply_start(
        self, conversation: Conversation, reply: int | None, think: str, bound: bool = False
    ) -> tuple[str, list[int]]:
        """The text of a reply that is gone on with, and its ids where they are known to the letter.

        Where the model is not to think any more, a thought that was cut ends there. bound: what it answers must keep to
        a grammar, so a model that speaks in channels is told that its answer begins.
        """
        if reply is None:
            return (harmony.FINAL if bound and harmony.is_template(self.tokenizer.chat_template) else ""), []
        content, known = conversation.turns[reply].message.content, self.exact
        if think == "off" and (ended := thinking.close_thought(content)) != content:
            return ended, []
        if known is None or known.conversation is not conversation or (known.reply, known.think) != (reply, think):
            return thinking.convert_for(self.tokenizer.chat_template, content), []
        return content, known.ids

    def ids_with_start(self, messages: Sequence[Message], think: str, begun: str, exact: list[int]) -> list[int]:
        """`ids` with the beginning of the reply that is gone on with: its ids as they came, else those of its text."""
        if not begun or exact:
            return [*self.ids(messages, think), *exact]
        form = self.tokenizer.chat_template
        begun = harmony.continuation(begun) if harmony.is_template(form) else template.escape_marks(form, begun)
        return self.tokenizer.encode(thinking.continue_prompt(self.text(messages, think), begun))

    def fit(
        self, conversation: Conversation, ids: Callable[[list[Message]], list[int]], size: int, max_tokens: int | None
    ) -> tuple[list[int], str]:
        """`ids` of the newest turns of the path that fit into `size` tokens, and what to tell of those that do not."""
        _, turns = conversation.model_context()
        before = self._left_out(turns)

        def without(left_out: int) -> list[int] | None:
            messages = messages_of(conversation, turns[2 * left_out :])
            length = sum(len(each.content.encode("utf-8", "replace")) + FRAME_BYTES for each in messages)
            return ids(messages) if length <= template.MAX_CONVERSATION_BYTES else None

        found = fit(without, len(turns) // 2, before, size, max_tokens)
        self.first = turns[2 * found.left_out] if found.left_out else None
        return found.ids, omission_notice(found, before)

    def _left_out(self, turns: list[int]) -> int:
        """Exchanges at the beginning of `turns` that the model does not read."""
        return turns.index(self.first) // 2 if self.first is not None and self.first in turns else 0


def messages_of(conversation: Conversation, turns: Sequence[int]) -> list[Message]:
    """The system prompt and these turns; a summary of what came before stands in the first message of the user."""
    system = [Message("system", conversation.system)] if conversation.system else []
    said = [conversation.turns[turn].message for turn in turns]
    summary, _ = conversation.model_context()
    if said and summary is not None:
        said[0] = Message(said[0].role, with_summary(summary.text, said[0].content))
    return system + said
