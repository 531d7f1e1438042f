"""One reply: the steps that its consumer gets, and its statistics."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from localq.errors import usage_error
from localq.stats import Stats, TokenLogprob


@dataclass(frozen=True)
class Step:
    """A step of a reply: new ids, prefill progress (no ids), or, with a reason, the end.

    reason: "stop" (a stop id, which is not among the ids), "length", "context" (the cache is full), "cancelled"
    logprobs: of the ids, where the reply has them
    """

    ids: tuple[int, ...]
    stats: Stats
    reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class ReplyStats:
    """Statistics of one reply: its progress, and the time of each phase."""

    def __init__(self, prompt: list[int], greedy: bool, limit: int, kept: int, ctx: int) -> None:
        self.prompt, self.greedy, self.limit, self.kept = prompt, greedy, limit, kept
        self.count = 0  # tokens of the reply, a stop token included
        self.steps = 0  # that have given tokens, that of the prompt included
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
            decode_steps=max(0, self.steps - 1),
            context_used=used,
            time_to_first_token_s=self._first_token_at - self._started,
            decode_s=now - self._first_token_at,
        )
        return self._stats

    def record_draft(self, source: str, drafted: int, accepted: int) -> None:
        """Count a step that has verified a draft."""
        stats = self._stats
        self._stats = replace(
            stats,
            drafted={**stats.drafted, source: stats.drafted.get(source, 0) + drafted},
            accepted={**stats.accepted, source: stats.accepted.get(source, 0) + accepted},
            drafted_at=_counted(stats.drafted_at, drafted),
            accepted_at=_counted(stats.accepted_at, accepted),
        )

    def end(self, reason: str) -> Step:
        """Return the last step of the reply."""
        return Step((), replace(self._stats, phase="done"), reason)


def _counted(counts: tuple[int, ...], first: int) -> tuple[int, ...]:
    """`counts` with 1 more at the `first` first positions."""
    longest = max(len(counts), first)
    padded = (*counts, *(0 for _ in range(longest - len(counts))))
    return tuple(count + (place < first) for place, count in enumerate(padded))


def check_request(prompt: list[int], max_tokens: int | None, vocab: int, ctx: int) -> None:
    """Raise LocalqError (exit 2) for a prompt that is empty, has unknown ids or is longer than `ctx`."""
    if not prompt:
        raise usage_error("prompt", "the prompt is empty", "Enter some text.")
    for id in prompt:
        if type(id) is not int or not 0 <= id < vocab:
            why = f"token {str(id)[:40]} is outside the vocabulary of {vocab} tokens"
            raise usage_error("prompt", why, "The tokenizer does not match this model.")
    if max_tokens is not None and max_tokens < 1:
        raise usage_error("max_tokens", f"{max_tokens} is too small", "Use 1 or more.")
    if len(prompt) > ctx:
        why = f"too long for the {ctx}-token context ({len(prompt)} tokens)"
        raise usage_error("prompt", why, "Shorten it, or use a larger context (--ctx).")
