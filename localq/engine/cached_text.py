"""The text in the cache of an engine: its ids, how much of it the states have read, and how far it can go back.

Ids are shortened before anything is overwritten and extended only after a pass has run, so they are right whatever
interrupts a reply: an error, a cancel, or a consumer that stops iterating. Where a pass does not end, the states of
recurrent layers are unknown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from localq.engine.cache import KVCache
from localq.engine.checkpoints import Checkpoints


class CachedText:
    """The ids whose keys and values are in `cache`.

    read   the number of tokens that the states have read; None where it is not known
    """

    def __init__(self, cache: KVCache, checkpoint_bytes: int = 0) -> None:
        self._cache = cache
        cache.begin()
        self.ids: list[int] = []
        self.read: int | None = 0
        self.checkpoints = Checkpoints(cache, checkpoint_bytes)

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
        if not self._goes_on_from(tokens):
            tokens = self.checkpoints.longest(tokens)
            if tokens:
                self.checkpoints.restore(tokens)
            else:
                self._cache.begin()
            self.read = tokens
        del self.ids[tokens:]
        self.checkpoints.cut(tokens)

    def _goes_on_from(self, tokens: int) -> bool:
        """True if the cache can go on from the first `tokens` tokens as it is."""
        return self._cache.keeps(tokens) and (not self._cache.states or self.read == tokens)

    def clear(self) -> None:
        """Forget the text. Its slots stay."""
        self.back_to(0)

    def restored(self, ids: list[int]) -> None:
        """Take the text whose parts were put into the cache."""
        self.ids, self.read = list(ids), len(ids)
        self.checkpoints.cut(0)

    def before(self, first: int) -> int:
        """Return how much of the text a measurement from position `first` on may leave."""
        return min(len(self.ids), first) if self._cache.keeps(first) else 0

    @contextmanager
    def passing(self, first: int, count: int) -> Iterator[None]:
        """Make room for a pass of `count` tokens from position `first` on, which runs inside."""
        self.read = None
        self._cache.make_room(first, count)
        yield
        self.read = first + count

    def checkpoint(self) -> None:
        """Keep a copy of what follows the text needs and cannot be cut, if the states are at its end."""
        if self.ids and (not self._cache.states or self.read == len(self.ids)):
            self.checkpoints.save(len(self.ids))
