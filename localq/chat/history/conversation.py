"""A conversation as a tree of turns: what was said stays, and one path through the tree is what the model reads.

A regenerated reply is a sister of the reply it replaces, an edited message a sister of the one it replaces. Turns are
only ever added, so a conversation is saved by saving what is new. Knows neither models nor files nor terminals.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from localq.errors import usage_error
from localq.stats import Stats
from localq.text import thinking

TITLE_CHARACTERS = 60


@dataclass(frozen=True)
class Message:
    """One turn: role "system", "user" or "assistant". `complete` is False for a reply that was cut.

    content   as it was said; of a reply the raw text, in which `thinking` finds thought and answer
    """

    role: str
    content: str
    complete: bool = True

    @property
    def answer(self) -> str:
        """What is said with it: a reply without its thought."""
        return thinking.split_reply(self.content)[1] if self.role == "assistant" else self.content

    @property
    def thought(self) -> str:
        """What the model thought before a reply."""
        return thinking.split_reply(self.content)[0] if self.role == "assistant" else ""

    def to_dict(self, template: str | None = None) -> dict[str, str]:
        """The form that this chat template takes (`thinking.read_by`). A thought that was cut ends where it was."""
        return {"role": self.role, "content": thinking.template_content(template, self.role, self.content)}


@dataclass(frozen=True)
class Turn:
    """A message in the tree: what it follows, when it came to be (Unix seconds), and the figures of a reply."""

    message: Message
    parent: int | None
    created_s: float
    stats: Stats | None = None


@dataclass(frozen=True)
class TurnSummary:
    """Stands for all turns up to `upto`, a reply, where the model reads a path that has it. made_at: the head then."""

    text: str
    upto: int
    made_at: int


def with_summary(summary: str, message: str) -> str:
    """A message of the user as the model reads it behind a summary. In the message, not beside it: templates want turns
    of the user and replies to take turns, and some know no system prompt."""
    return f"What was said before, in short:\n\n{summary}\n\n(End of what was said before.)\n\n{message}"


@dataclass
class Conversation:
    """Turns, numbered as they came. The path ends at `head`; None is an empty conversation.

    Along a path messages of the user and replies take turns, beginning with the user; a path may end in a message that
    has no answer (yet).
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
        """The path without a message at its end that has no answer."""
        path = self.path()
        return path[:-1] if path and self.turns[path[-1]].message.role == "user" else path

    def model_context(self) -> tuple[TurnSummary | None, list[int]]:
        """What is read of the path: the summary of its beginning, if there is one, and the turns behind it."""
        path = self.path()
        place = {turn: index for index, turn in enumerate(path)}
        fits = [each for each in self.summaries if each.upto in place]
        if not fits:
            return None, path
        newest = max(reversed(fits), key=lambda each: place[each.upto])  # of two that reach as far, the later one
        return newest, path[place[newest.upto] + 1 :]

    def messages(self) -> list[Message]:
        """Of `answered`."""
        return [self.turns[turn].message for turn in self.answered_path()]

    def last_user(self) -> int | None:
        """The last message of the user on the path, answered or not."""
        return next((turn for turn in reversed(self.path()) if self.turns[turn].message.role == "user"), None)

    def last_reply(self) -> int | None:
        """The reply at the end of the path."""
        path = self.answered_path()
        return path[-1] if path else None

    def final_reply(self, command: str, to: str) -> int:
        """`last_reply` for `command`, which is there `to` do something with it. Raises LocalqError (exit 2) where there
        is none, or where a message behind it has none."""
        reply = self.last_reply()
        if reply is None or reply != self.head:
            step = "Say something first." if self.head is None else "/regen answers the last message."
            raise usage_error(command, f"there is no reply to {to}", step)
        return reply

    def siblings(self, turn: int) -> list[int]:
        """The turns that stand in the same place, `turn` among them, the oldest first."""
        parent, role = self.turns[turn].parent, self.turns[turn].message.role
        return [index for index, each in enumerate(self.turns) if each.parent == parent and each.message.role == role]

    def versions(self, shown: Sequence[int]) -> dict[int, str]:
        """Turn -> "2 of 3", of those in `shown` that stand where others do too: `sisters`, of all at once."""
        parents = {self.turns[number].parent for number in shown}
        places: dict[tuple[int | None, str], list[int]] = {}
        for number, turn in enumerate(self.turns):
            if turn.parent in parents:
                places.setdefault((turn.parent, turn.message.role), []).append(number)
        return {
            number: f"{place} of {len(sisters)}"
            for sisters in places.values() if len(sisters) > 1
            for place, number in enumerate(sisters, 1)
        }  # fmt: skip

    def alternatives(self) -> list[int]:
        """Where the path can go on instead, with `take`: the replies to the last message of the user, the messages
        that were said in its place, and those that were said behind the last reply. With `undo`, every turn is reached.
        """
        last, end = self.last_user(), self.last_reply()
        replies = [index for index, each in enumerate(self.turns) if last is not None and each.parent == last]
        instead = [] if last is None else self.siblings(last)
        behind = [index for index, each in enumerate(self.turns) if each.parent == end and each.message.role == "user"]
        return [turn for turn in dict.fromkeys((*replies, *instead, *behind)) if turn != last]

    def title(self) -> str:
        """The first words of the user, on one line."""
        first = next((turn.message.content for turn in self.turns if turn.message.role == "user"), "")
        words = " ".join(first[: 10 * TITLE_CHARACTERS].split())
        return words if len(words) <= TITLE_CHARACTERS else words[: TITLE_CHARACTERS - 3].rstrip() + "..."

    def replies(self) -> Iterator[Turn]:
        """Every reply that was ever given, those that were replaced too."""
        return (turn for turn in self.turns if turn.message.role == "assistant")

    # ---- changing

    def add(self, message: Message, parent: int | None, stats: Stats | None = None) -> int:
        """Put `message` behind `parent`; it becomes the head."""
        self.turns.append(Turn(message, parent, time.time(), stats))
        self.head = len(self.turns) - 1
        return self.head

    def add_user(self, text: str) -> int:
        """A message of the user behind the last reply."""
        return self.add(Message("user", text), self.last_reply())

    def edit_user(self, text: str, turn: int | None = None) -> int:
        """Say `text` in place of `turn`, or of the last message of the user. What followed stays on its own branch."""
        replaced = self.last_user() if turn is None else turn
        if replaced is None or self.turns[replaced].message.role != "user":
            raise usage_error("/edit", "there is no message to edit", "Say something first.")
        return self.add(Message("user", text), self.turns[replaced].parent)

    def edit_reply(self, text: str) -> int:
        """Put `text` in place of the last reply."""
        replaced = self.final_reply("/edit -a", "edit")
        return self.add(Message("assistant", text), self.turns[replaced].parent)

    def add_summary(self, text: str, upto: int) -> None:
        """From now on `text` is read in place of the turns up to `upto`, which stay. Takes the place of one made so."""
        self.summaries = [each for each in self.summaries if each.upto != upto]
        assert self.head is not None
        self.summaries.append(TurnSummary(text, upto, self.head))

    def remove_summary(self) -> bool:
        """Read what the summary stands for again; False where there is none."""
        summary, _ = self.model_context()
        self.summaries = [each for each in self.summaries if summary is None or each.upto != summary.upto]
        return summary is not None

    def undo(self) -> str:
        """Go back to before the last message of the user, which is returned."""
        last = self.last_user()
        if last is None:
            raise usage_error("/undo", "there is nothing to undo", "Say something first.")
        self.head = self.turns[last].parent
        return self.turns[last].message.content

    def switch_to(self, turn: int) -> None:
        """Go on at `turn`, at the newest end of what follows it."""
        newest = {each.parent: index for index, each in enumerate(self.turns)}
        while turn in newest:
            turn = newest[turn]
        self.head = turn
