"""A conversation as a tree of turns; the path from the root to the head is the current branch.

A regenerated reply is a sibling of the reply it replaces, an edited message a sibling of the original. Turns are only
added, so saving a conversation writes the new ones only. Knows neither models nor files nor terminals.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from localq.chat.attachments import AttachedFile
from localq.chat.history.tool_rounds import ToolRound
from localq.errors import usage_error
from localq.stats import Stats
from localq.text import thinking
from localq.text.tokenizer_like import TokenizerLike
from localq.text.tools.declaration import ToolCall

TITLE_CHARACTERS = 60


SEPARATOR = "\n\n"  # between attachments, and before the words of a message


@dataclass(frozen=True)
class Message:
    """A message with role "system", "user" or "assistant". complete: False for a reply that was cut.

    content      the text; of a reply the raw text, with the thought in it (`text.thinking`)
    attachments  files that the content of a user message begins with, in their order
    rounds       of a reply: earlier parts of it, each of which ended in tool calls; `content` is what follows them
    """

    role: str
    content: str
    complete: bool = True
    attachments: tuple[AttachedFile, ...] = ()
    rounds: tuple[ToolRound, ...] = ()

    @property
    def words(self) -> str:
        """The content without attachments."""
        return self.content[sum(each.length + len(SEPARATOR) for each in self.attachments) :]

    @property
    def shown(self) -> str:
        """Text that a front end shows: the answer of a reply, or the words of a user."""
        return self.answer if self.role == "assistant" else self.words

    def attached_texts(self) -> tuple[tuple[AttachedFile, str], ...]:
        """The attachments with their part of the content."""
        found, start = [], 0
        for each in self.attachments:
            found.append((each, self.content[start : start + each.length]))
            start += each.length + len(SEPARATOR)
        return tuple(found)

    @property
    def answer(self) -> str:
        """The text without the thought of a reply."""
        return thinking.split_reply(self.content)[1] if self.role == "assistant" else self.content

    @property
    def thought(self) -> str:
        """The thought of a reply."""
        return thinking.split_reply(self.content)[0] if self.role == "assistant" else ""

    @property
    def size_bytes(self) -> int:
        """Bytes of content and rounds, as UTF-8."""
        return len(self.content.encode("utf-8", "replace")) + sum(each.size_bytes for each in self.rounds)

    @property
    def parts(self) -> int:
        """Messages that the template gets for it, at most: itself, and those of its rounds."""
        return 1 + sum(1 + len(each.calls) for each in self.rounds)

    def to_dict(self, tokenizer: TokenizerLike) -> dict[str, str]:
        """The message as the model's chat template takes it (`thinking.template_message`), without its rounds."""
        return thinking.template_message(tokenizer, self.role, self.content)

    def to_dicts(self, tokenizer: TokenizerLike) -> list[dict[str, Any]]:
        """The rounds, as messages with calls and messages with results, then `to_dict`.

        A reply that goes on after its last round has no content yet, so nothing follows the rounds.
        """
        before = [part for each in self.rounds for part in _round_dicts(each, tokenizer)]
        return [*before, self.to_dict(tokenizer)] if self.content or not before else before


def _round_dicts(each: ToolRound, tokenizer: TokenizerLike) -> list[dict[str, Any]]:
    """The messages of a round for `text.tools.ToolFormat.messages`, which escapes marks in arguments and results."""
    calls = [ToolCall(call.tool, call.arguments).to_dict(call.id) for call in each.calls]
    reply = {**thinking.template_message(tokenizer, "assistant", each.content), "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": call.id, "name": call.tool, "content": call.result} for call in each.calls
    ]
    return [reply, *results]


def user_message(words: str, attached: Sequence[tuple[AttachedFile, str]] = ()) -> Message:
    """A user message of files with their texts, and words, which may be empty."""
    parts = [*(text for _, text in attached), *([words] if words or not attached else [])]
    return Message("user", SEPARATOR.join(parts), attachments=tuple(each for each, _ in attached))


@dataclass(frozen=True)
class Turn:
    """A message in the tree: its parent, its time (Unix seconds), and of a reply its statistics and its model."""

    message: Message
    parent: int | None
    created_s: float
    stats: Stats | None = None
    model: str = ""


@dataclass(frozen=True)
class TurnSummary:
    """Summary of all turns up to `upto`, a reply, for prompts of paths that have it. made_at: the head then."""

    text: str
    upto: int
    made_at: int


def with_summary(summary: str, message: str) -> str:
    """A user message with the summary before it, as the prompt has it.

    In one message, because templates require user messages and replies to alternate, and some have no system prompt.
    """
    return f"Summary of the conversation so far:\n\n{summary}\n\n(End of the summary.)\n\n{message}"


@dataclass
class Conversation:
    """Turns, numbered in the order of their creation. The path ends at `head`; None: empty conversation.

    On a path user messages and replies alternate, beginning with the user; the last message may have no reply yet.
    """

    turns: list[Turn] = field(default_factory=list)
    head: int | None = None
    system: str | None = None
    summaries: list[TurnSummary] = field(default_factory=list)

    # ---- reading

    def path(self) -> list[int]:
        """The turns from the first to the head."""
        found, turn = [], self.head
        while turn is not None:
            found.append(turn)
            turn = self.turns[turn].parent
        return found[::-1]

    def answered_path(self) -> list[int]:
        """The path without a last message that has no reply."""
        path = self.path()
        return path[:-1] if path and self.turns[path[-1]].message.role == "user" else path

    def model_context(self) -> tuple[TurnSummary | None, list[int]]:
        """Return the prompt's part of the path: the summary of its beginning, if any, and the turns after it."""
        path = self.path()
        place = {turn: index for index, turn in enumerate(path)}
        fits = [each for each in self.summaries if each.upto in place]
        if not fits:
            return None, path
        newest = max(reversed(fits), key=lambda each: place[each.upto])  # of equals the later one
        return newest, path[place[newest.upto] + 1 :]

    def messages(self) -> list[Message]:
        """Messages of `answered_path`."""
        return [self.turns[turn].message for turn in self.answered_path()]

    def last_user(self) -> int | None:
        """The last user message on the path, answered or not."""
        return next((turn for turn in reversed(self.path()) if self.turns[turn].message.role == "user"), None)

    def last_reply(self) -> int | None:
        """The reply at the end of the path."""
        path = self.answered_path()
        return path[-1] if path else None

    def final_reply(self, command: str, to: str) -> int:
        """The reply that is the head, for a command that wants `to` do something with it.

        Raises LocalqError (exit 2) where the path is empty or its last message has no reply.
        """
        reply = self.last_reply()
        if reply is None or reply != self.head:
            step = "Send a message first." if self.head is None else "Generate one with /regen."
            raise usage_error(command, f"there is no reply to {to}", step)
        return reply

    def siblings(self, turn: int) -> list[int]:
        """The versions of a turn, itself included, the oldest first."""
        parent, role = self.turns[turn].parent, self.turns[turn].message.role
        return [index for index, each in enumerate(self.turns) if each.parent == parent and each.message.role == role]

    def versions(self, shown: Sequence[int]) -> dict[int, str]:
        """Turn -> "2 of 3", for those in `shown` that have siblings."""
        parents = {self.turns[number].parent for number in shown}
        places: dict[tuple[int | None, str], list[int]] = {}
        for number, turn in enumerate(self.turns):
            if turn.parent in parents:
                places.setdefault((turn.parent, turn.message.role), []).append(number)
        return {
            number: f"{place} of {len(siblings)}"
            for siblings in places.values() if len(siblings) > 1
            for place, number in enumerate(siblings, 1)
        }  # fmt: skip

    def alternatives(self) -> list[int]:
        """Turns that `switch_to` can select: replies to the last user message, its siblings, and messages after the
        last reply. Together with `undo`, every turn can be reached."""
        last, end = self.last_user(), self.last_reply()
        replies = [index for index, each in enumerate(self.turns) if last is not None and each.parent == last]
        instead = [] if last is None else self.siblings(last)
        behind = [index for index, each in enumerate(self.turns) if each.parent == end and each.message.role == "user"]
        return [turn for turn in dict.fromkeys((*replies, *instead, *behind)) if turn != last]

    def title(self) -> str:
        """The first words of the first message, on one line; the names of its attachments where it has no words."""
        first = next((turn.message for turn in self.turns if turn.message.role == "user"), Message("user", ""))
        named = (first.words.strip() and first.words) or ", ".join(each.name for each in first.attachments)
        words = " ".join(named[: 10 * TITLE_CHARACTERS].split())
        return words if len(words) <= TITLE_CHARACTERS else words[: TITLE_CHARACTERS - 3].rstrip() + "..."

    def call_count(self) -> int:
        """Number of tool calls, on all branches."""
        return sum(len(each.calls) for turn in self.turns for each in turn.message.rounds)

    def replies(self) -> Iterator[Turn]:
        """All replies, on all branches."""
        return (turn for turn in self.turns if turn.message.role == "assistant")

    # ---- changing

    def add(self, message: Message, parent: int | None, stats: Stats | None = None, model: str = "") -> int:
        """Add `message` after `parent`; it becomes the head."""
        self.turns.append(Turn(message, parent, time.time(), stats, model))
        self.head = len(self.turns) - 1
        return self.head

    def add_user(self, text: str, attached: Sequence[tuple[AttachedFile, str]] = ()) -> int:
        """Add a user message after the last reply. attached: files with their texts, which go before `text`."""
        return self.add(user_message(text, attached), self.last_reply())

    def edit_user(self, text: str, turn: int | None = None) -> int:
        """Add `text` as a sibling of `turn` (None: the last user message); what followed stays on its branch.

        The attachments stay.
        """
        replaced = self.last_user() if turn is None else turn
        if replaced is None or self.turns[replaced].message.role != "user":
            raise usage_error("/edit", "there is no message to edit", "Send a message first.")
        old = self.turns[replaced]
        return self.add(user_message(text, old.message.attached_texts()), old.parent)

    def edit_reply(self, text: str) -> int:
        """Add `text` as a sibling of the last reply."""
        replaced = self.turns[self.final_reply("/edit -a", "edit")]
        return self.add(Message("assistant", text, rounds=replaced.message.rounds), replaced.parent)

    def add_summary(self, text: str, upto: int) -> None:
        """Use `text` in prompts in place of the turns up to `upto`; replaces an earlier summary of the same turns."""
        self.summaries = [each for each in self.summaries if each.upto != upto]
        assert self.head is not None
        self.summaries.append(TurnSummary(text, upto, self.head))

    def remove_summary(self) -> bool:
        """Remove the summary, so that prompts have its turns again; False where there is none."""
        summary, _ = self.model_context()
        self.summaries = [each for each in self.summaries if summary is None or each.upto != summary.upto]
        return summary is not None

    def undo(self) -> str:
        """Go back to before the last user message; return its words."""
        last = self.last_user()
        if last is None:
            raise usage_error("/undo", "there is nothing to undo", "Send a message first.")
        self.head = self.turns[last].parent
        return self.turns[last].message.words

    def switch_to(self, turn: int) -> None:
        """Make the newest end of what follows `turn` the head."""
        newest = {each.parent: index for index, each in enumerate(self.turns)}
        while turn in newest:
            turn = newest[turn]
        self.head = turn
