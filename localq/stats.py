"""What the engine reports while it works. Torch-free: the front ends draw it, the engine fills it in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stats:
    """A snapshot of one reply, sent with every stream event.

    phase                 "prefill", "decode" or "done"
    prompt_tokens         tokens of the whole prompt
    cached_tokens         of these, already in the KV cache from the turn before: not computed again
    prefilled_tokens      of the others, computed so far
    generated_tokens      tokens of the reply so far
    time_to_first_token_s from the request to the first token; 0 before it
    prefill_s, decode_s   seconds spent in each phase so far
    context_used          positions of the KV cache in use
    context_size          positions of the KV cache
    """

    phase: str = "prefill"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    time_to_first_token_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    context_used: int = 0
    context_size: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed; the first token belongs to the prefill."""
        return (self.generated_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def context_fill(self) -> float:
        """Share of the context in use, 0 to 1."""
        return self.context_used / self.context_size if self.context_size else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain form for messages and `--json`."""
        return dataclasses.asdict(self)
