"""Limits of a reply that the front end sets: a default length, and a guard that stops a reply which repeats itself.

default length  ANSWER_TOKENS tokens of answer; thoughts are not counted. It applies where no max_tokens is set
loop guard      stops where the reply ends in one block of tokens, repeated exactly, over a long stretch. Prose stops
                after PROSE.tokens: a hundred lines of fifteen tokens, as a user may ask for, are fewer. Code blocks,
                tables and digits repeat for good reasons (a lookup table of zeros has a thousand tokens): they stop
                after OTHER.tokens. A counter or any other change in the block is no repetition

Both count tokens one by one, so that where a reply is cut does not depend on how the engine groups them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

ANSWER_TOKENS = 4096  # settings.DESCRIPTIONS says so too
DEFAULT_LENGTH, REPETITION = "default_length", "repetition"  # reasons of a `Reply`
CHECK_EVERY = 64  # tokens; a check takes about 1 ms
LONGEST_BLOCK = 1024  # tokens of a block that is recognized
_LETTERS = 0.7  # least share of letters in prose, of all but white space
_FENCE = "```"


@dataclass(frozen=True)
class Threshold:
    """Minimum size of a repetition: total tokens of the repeated blocks, and the number of blocks."""

    tokens: int
    blocks: int


PROSE, OTHER = Threshold(1536, 6), Threshold(4096, 8)
_WINDOW = max(OTHER.tokens, LONGEST_BLOCK * OTHER.blocks)  # last tokens that a check reads


@dataclass(frozen=True)
class ReplyLimits:
    """Limits of one reply. answer_tokens None: no default length; stop_loops: the loop guard is on."""

    answer_tokens: int | None = None
    stop_loops: bool = False


NO_LIMITS = ReplyLimits()


@dataclass(frozen=True)
class Cycle:
    """The repetition at the end of a sequence: `blocks` times a block of `period` tokens, and a part of one."""

    period: int
    tokens: int

    @property
    def blocks(self) -> int:
        """Whole blocks."""
        return self.tokens // self.period

    def reaches(self, threshold: Threshold) -> bool:
        """Return whether the repetition is as long as `threshold`."""
        return self.tokens >= threshold.tokens and self.blocks >= threshold.blocks


def find_cycle(ids: Sequence[int]) -> Cycle | None:
    """The longest repetition at the end of `ids` that reaches PROSE; None without one. Linear in the window."""
    last = ids[: -_WINDOW - 1 : -1]  # reversed: an end that repeats is a beginning here
    border, length = [0] * len(last), 0
    for place in range(1, len(last)):
        while length and last[place] != last[length]:
            length = border[length - 1]
        length += last[place] == last[length]
        border[place] = length
    for tokens in range(len(last), PROSE.tokens - 1, -1):
        period = tokens - border[tokens - 1]
        if period <= LONGEST_BLOCK and tokens >= period * PROSE.blocks:
            return Cycle(period, tokens)
    return None


class ReplySoFar(Protocol):
    """The part of a `ReplyDecoder` that limits read."""

    ids: list[int]
    answer: str

    @property
    def thinking(self) -> bool:
        """True while the thought has not ended."""


class LimitWatch:
    """Watches one reply while it streams. `reason`: which limit ended it; "" so far. cycle: of the loop guard."""

    def __init__(self, limits: ReplyLimits, decode: Callable[[list[int]], str]) -> None:
        """decode: text of token ids."""
        self._limits, self._decode = limits, decode
        self._answered = 0  # tokens of the answer
        self.reason = ""
        self.cycle: Cycle | None = None

    def is_full(self) -> bool:
        """Return whether the answer has reached its default length, so that the next token ends it."""
        most = self._limits.answer_tokens
        if most is not None and self._answered >= most:
            self.reason = DEFAULT_LENGTH
        return bool(self.reason)

    def count(self, reply: ReplySoFar) -> None:
        """Count the token that `reply` has just received."""
        self._answered += not reply.thinking
        if not self._limits.stop_loops or len(reply.ids) % CHECK_EVERY or len(reply.ids) < PROSE.tokens:
            return
        cycle = find_cycle(reply.ids)
        if cycle is not None and cycle.reaches(PROSE if self._is_prose(cycle, reply) else OTHER):
            self.reason, self.cycle = REPETITION, cycle

    def _is_prose(self, cycle: Cycle, reply: ReplySoFar) -> bool:
        """Return whether the repeating block is running text outside a code block."""
        if not reply.thinking and reply.answer.count(_FENCE) % 2:
            return False
        text = "".join(self._decode(reply.ids[-cycle.period :]).split())
        return "|" not in text and sum(map(str.isalpha, text)) >= _LETTERS * max(1, len(text))
