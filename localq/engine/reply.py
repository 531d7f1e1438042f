"""One reply: the steps that its consumer gets, and its statistics."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from localq.stats import Stats


@dataclass(frozen=True)
class Step:
    """A step of a reply: new ids, prefill progress (no ids), or, with a reason, the end.

    reason: "stop" (a stop id, which is not among the ids), "length", "context" (the cache is full), "cancelled"
    """

    ids: tuple[int, ...]
    stats: Stats
    reason: str | None = None


class ReplyStats:
    """Statistics of one reply: its progress, and the time of each phase."""

    def __init__(self, prompt: list[int], greedy: bool, limit: int, kept: int, ctx: int) -> None:
        self.prompt, self.greedy, self.limit, self.kept = prompt, greedy, limit, kept
        self.count = 0  # tokens of the reply, a stop token included
        self._started = time.perf_counter()
        self._first_token_at = 0.0
        self._stats = Stats(
            prompt_tokens=len(prompt), cached_tokens=kept, context_used=kept, context_size=ctx, phase="prefill"
        )

    def record_prefill(self, used: int) -> Stats:
        """Count a prefill pass, after which `used` positions are in the cache."""
        now = time.perf_counter() - self._started
        self._stats = replace(self._stats, prefilled_tokens=used - self.kept, context_used=used, prefill_s=now)
        return self._stats

    def recomputing(self, done: int, total: int) -> Stats:
        """Return the progress of computing the conversation again amid the reply, in the form of a prefill.

        It counts as time of the reply: the statistics that follow do not have it as prefill.
        """
        return replace(
            self._stats, phase="prefill", prompt_tokens=total, cached_tokens=0, prefilled_tokens=done, context_used=done
        )

    def record_token(self) -> Stats:
        """Count a token of the reply."""
        now = time.perf_counter()
        if self.count == 1:
            self._first_token_at = now
        used = min(len(self.prompt) + self.count, self._stats.context_size)
        self._stats = replace(
            self._stats,
            phase="decode",
            generated_tokens=self.count,
            context_used=used,
            time_to_first_token_s=self._first_token_at - self._started,
            decode_s=now - self._first_token_at,
        )
        return self._stats

    def end(self, reason: str) -> Step:
        """Return the last step of the reply."""
        return Step((), replace(self._stats, phase="done"), reason)
