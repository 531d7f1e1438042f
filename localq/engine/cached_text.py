"""The text in the cache of an engine: its ids, how much of it the states have read, and how far it can go back.

Ids are shortened before anything is overwritten and extended only after a pass has run, so they are right whatever
interrupts a reply: an error, a cancel, or a consumer that stops iterating. Where a pass does not end, the states of
recurrent layers are unknown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from localq.engine.cache import KVCache
from localq.engine.checkpoints import Checkpoints


class Follower(Protocol):
    """A reader of the hidden states that the passes over a text leave behind (`engine.draft.head`)."""

    def make_room(self, ids: Sequence[int], first: int, count: int) -> None:
        """Read what a pass over `count` positions from `first` on overwrites; ids: the text before it, but the last
        few tokens."""

    def passed(self, first: int, count: int) -> None:
        """Take note of such a pass."""

    def cut(self, tokens: int) -> None:
        """Take note that the text has been cut to its first `tokens` tokens."""


class CachedText:
    """The ids whose keys and values are in `cache`.

    follower   is told of every pass and cut, if there is one
    read   the number of tokens that the states have read; None where it is not known. Behind them, the cache may keep
           the inputs of drafted tokens (`KVCache.replayable`); those in the text were accepted
    """

    def __init__(
        self, cache: KVCache, checkpoint_bytes: int = 0, replay: Callable[[int], None] = lambda count: None
    ) -> None:
        """replay: moves the states on by so many of the drafted tokens behind them, and drops the others."""
        self._cache, self._replay = cache, replay
        cache.begin()
        self.ids: list[int] = []
        self.read: int | None = 0
        self.checkpoints = Checkpoints(cache, checkpoint_bytes)
        self.follower: Follower | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def reuse(self, prompt: list[int]) -> int:
        """Cut the text to the longest prefix that `prompt` can go on from; returns its length.

        At least the last token of the prompt is left, for the logits.
        """
        pairs = zip(self.ids, prompt[:-1], strict=False)
        self.back_to(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return len(self.ids)

    def back_to(self, tokens: int) -> None:
        """Cut the text to at most `tokens` tokens: as many as the cache, or a checkpoint, can go on from."""
        if not self._settles(tokens):
            tokens = self.checkpoints.longest(tokens)
            if tokens:
                self.checkpoints.restore(tokens)
            else:
                self._cache.begin()
            self.read = tokens
        del self.ids[tokens:]
        self.checkpoints.cut(tokens)
        if self.follower is not None:
            self.follower.cut(tokens)

    def _settles(self, tokens: int) -> bool:
        """True if the cache can go on from the first `tokens` tokens; the states are then those behind them."""
        cache = self._cache
        if not cache.keeps(tokens):
            return False
        if not cache.states:
            return True
        if self.read is None or not self.read <= tokens <= self.read + cache.replayable:
            return False
        if cache.replayable:
            self._replay(tokens - self.read)
        self.read = tokens
        return True

    def clear(self) -> None:
        """Forget the text. Its slots stay."""
        self.back_to(0)

    def restored(self, ids: list[int]) -> None:
        """Take the text whose parts were put into the cache."""
        self.ids, self.read = list(ids), len(ids)
        self.checkpoints.cut(0)
        if self.follower is not None:
            self.follower.cut(0)

    def before(self, first: int) -> int:
        """Return how much of the text a measurement from position `first` on may leave."""
        return min(len(self.ids), first) if self._cache.keeps(first) else 0

    @contextmanager
    def passing(self, first: int, count: int, drafted: int = 0) -> Iterator[None]:
        """Make room for a pass of `count` tokens from position `first` on, the last of them drafted; it runs inside."""
        self.read = None
        if self.follower is not None:
            self.follower.make_room(self.ids, first, count)
        self._cache.make_room(first, count)
        yield
        self.read = first + count - drafted
        if self.follower is not None:
            self.follower.passed(first, count)

    def checkpoint(self) -> None:
        """Keep a copy of what follows the text needs and cannot be cut, if the states are or can be at its end."""
        if self.ids and self._settles(len(self.ids)):
            self.checkpoints.save(len(self.ids))
