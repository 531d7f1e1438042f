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

    def draft(self) -> list[int]:
        """Return the rest of the ending, or what the grammar forces."""
        self.free()
        if self._ending:
            return list(self._ending)
        return [] if self._inner is None else self._inner.draft()

    def fork(self) -> BudgetFork:
        """Return a copy that goes as far as what comes next is certain."""
        self.free()
        inner = None if self._inner is None else self._inner.fork()
        return BudgetFork(list(self._ending), self._left(), inner, self._rows)

    def count(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps of the reply, with the number of forced tokens in their statistics."""
        for step in steps:
            yield dataclasses.replace(step, stats=dataclasses.replace(step.stats, forced_tokens=self.forced))

    def _left(self) -> int:
        """Return how many of the next tokens cannot exceed the budget."""
        state = self._state
        if self._is_done or state.over:
            return FREE
        if self._ending:
            return 0
        left = max(0, self._tokens - state.used)
        if state.thinking:
            return left or int(not state.can_end())
        return 0 if not left and state.can_end() else left + 1  # the next token may open the thought


class BudgetFork:
    """Tokens that a `ThinkingBudget` allows along a draft: its ending, or what its grammar allows within the budget.

    The fork stops where the budget may decide otherwise: a draft ends there.
    """

    def __init__(self, ending: list[int], left: int, inner: Constraint | None, rows: int) -> None:
        """left: tokens that cannot be past the budget, where no ending is to come."""
        self._ending, self._inner, self._rows = ending, inner, rows
        self._left = len(ending) or left

    def free(self) -> int:
        """Return how many of the next tokens may be any."""
        if self._ending:
            return 0
        return self._left if self._inner is None else min(self._left, self._inner.free())

    def mask(self) -> Tensor:
        """Return i32 [ceil(rows / 32)]."""
        if self._ending:
            return only(self._ending[0], self._rows)
        assert self._inner is not None
        return self._inner.mask()

    def accept(self, token: int) -> None:
        """Advance by a drafted token."""
        self._left -= 1
        self._ending = self._ending[1:]
        if self._inner is not None:
            self._inner.accept(token)

    @property
    def stopped(self) -> bool:
        """True where no more is certain."""
        return self._left <= 0 or (self._inner is not None and self._inner.stopped)

    def draft(self) -> list[int]:
        """Return nothing: a draft is made of what the budget itself forces."""
        return []

    def fork(self) -> BudgetFork:
        """Return a copy that advances on its own."""
        inner = None if self._inner is None else self._inner.fork()
        return BudgetFork(list(self._ending), self._left, inner, self._rows)
