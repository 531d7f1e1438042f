"""A thinking budget: when a thought has used its tokens, the ids of its end come next, whatever the model would say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from localq.engine.constraint import FREE, Constraint, only

if TYPE_CHECKING:
    from torch import Tensor

    from localq.engine.reply import Step
    from localq.text.thought_state import ThoughtState
    from localq.text.tokenizer_like import TokenizerLike


class ThinkingBudget:
    """An `engine.constraint.Constraint` for one reply, around that of a grammar, if there is one.

    The tokens of the ending do not count. forced: how many of them the reply has.
    """

    def __init__(
        self, tokens: int, state: ThoughtState, tokenizer: TokenizerLike, rows: int, inner: Constraint | None = None
    ) -> None:
        """tokens: of the thought, with those that the prompt contains; rows: of the model's logits."""
        self._tokens, self._state, self._tokenizer, self._rows, self._inner = tokens, state, tokenizer, rows, inner
        self._ending: list[int] = []  # ids that are still to come
        self._is_done = False
        self.forced = 0

    def free(self) -> int:
        """Return how many of the next tokens may be any: 0 where the thought has to end now."""
        own = self._left()
        if own == 0 and not self._ending:
            self._ending = self._tokenizer.encode(self._state.ending())
            self._is_done = not self._ending
            own = FREE if self._is_done else 0
        return own if self._inner is None else min(own, self._inner.free())

    def mask(self) -> Tensor:
        """Return i32 [ceil(rows / 32)]: the next id of the ending, else what the grammar allows."""
        self.free()
        if self._ending:
            return only(self._ending[0], self._rows)
        assert self._inner is not None
        return self._inner.mask()

    def accept(self, token: int) -> None:
        """Advance by the next token of the reply."""
        if self._inner is not None:
            self._inner.accept(token)
        if self._is_done:
            return
        self._state.push(token)
        if self._ending:
            self.forced += 1
            del self._ending[0]
            self._is_done = not self._ending
        self._is_done = self._is_done or self._state.over

    @property
    def stopped(self) -> bool:
        """True when nothing can follow."""
        return self._inner is not None and self._inner.stopped

    def count(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps of the reply, with the number of forced tokens in their statistics."""
        for step in steps:
            yield dataclasses.replace(step, stats=dataclasses.replace(step.stats, forced_tokens=self.forced))

    def _left(self) -> int:
        """How many of the next tokens cannot be past the budget."""
        state = self._state
        if self._is_done or state.over:
            return FREE
        if self._ending:
            return 0
        left = max(0, self._tokens - state.used)
        if state.thinking:
            return left or int(not state.can_end())
        return 0 if not left and state.can_end() else left + 1  # the next token may open the thought
