"""Figures that the engine reports while it works and front ends show. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of a token's probability, and the likeliest tokens with theirs, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "top", tuple([(id, value) for id, value in self.top]))  # JSON has no tuples


@dataclass(frozen=True)
class Stats:
    """Counts and times of one reply, sent with every stream event.

    phase                 "prefill", "decode" or "done"
    prompt_tokens         tokens of the whole prompt
    cached_tokens         of these, already in the KV cache, so not computed again
    prefilled_tokens      of the rest, computed so far
    generated_tokens      tokens of the reply so far
    forced_tokens         of these, the ones that ended a thought at its budget; the model did not choose them
    time_to_first_token_s from the request to the first token; 0 before it
    prefill_s, decode_s   seconds spent in each phase so far
    context_used          positions of the KV cache in use
    context_size          positions of the KV cache
    decode_steps          passes that gave the tokens of the reply behind its first; with drafts fewer than the tokens
    drafted, accepted     source of drafts ("lookup", "grammar", "model", "mtp") -> tokens drafted, and those accepted
    drafted_at, accepted_at   the same by position in the draft, all sources together
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
    forced_tokens: int = 0
    decode_steps: int = 0
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("drafted_at", "accepted_at"):  # JSON has no tuples
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a decode step gave, on average; 1 without drafts, 0 before the first."""
        return max(0, self.generated_tokens - 1) / self.decode_steps if self.decode_steps else 0.0

    @property
    def steps_per_s(self) -> float:
        """Decode steps a second: each reads the weights once."""
        return self.tokens_per_s / self.tokens_per_step if self.drafted else self.tokens_per_s

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted, 0 to 1."""
        drafted = sum(self.drafted.values())
        return sum(self.accepted.values()) / drafted if drafted else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed; the first token counts as prefill."""
        return max(0, self.generated_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def context_fill(self) -> float:
        """Share of the context in use, 0 to 1."""
        return self.context_used / self.context_size if self.context_size else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain form for messages."""
        return dataclasses.asdict(self)

    def report(self) -> dict[str, Any]:
        """Plain form for `--json`: with what follows from the counts, and units in key names of drafts."""
        found = dataclasses.asdict(self)
        counts = {name: found.pop(name) for name in ("drafted", "accepted", "drafted_at", "accepted_at")}
        return {
            **found,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_step": self.tokens_per_step,
            "drafted_tokens": counts["drafted"],
            "accepted_tokens": counts["accepted"],
            "drafted_tokens_by_position": list(counts["drafted_at"]),
            "accepted_tokens_by_position": list(counts["accepted_at"]),
        }


@dataclass(frozen=True)
class Operation:
    """All launches of one kind in a decode step.

    kernel   their role in the model: "qkv", "attention", "delta", "conv", "o", "router", "gate_up", "down",
             "norm", "embed", "head", "sample"
    calls    number of launches
    us       sum of the times from the start of each to the start of the next; medians over some steps
    bytes    minimum traffic: weights once, activations once, cache slots up to the position
    """

    kernel: str
    calls: int
    us: float
    bytes: int

    @property
    def gb_per_s(self) -> float:
        """Minimum traffic divided by the time."""
        return self.bytes / self.us / 1e3 if self.us > 0 else 0.0


@dataclass(frozen=True)
class StepProfile:
    """Time of one decode step by kernel.

    rows          one per operation, in the order of the step; timed separately
    step_us       one replay of the whole step, back to back with others
    host_gap_us   wall time per token in steady decoding minus step_us
    position      cache slot of the step
    timer         "cupti": kernel records of a replay; "events": a graph with an event between the operations
    """

    rows: tuple[Operation, ...]
    step_us: float
    host_gap_us: float
    position: int
    timer: str

    @property
    def sum_us(self) -> float:
        """Sum of the rows; close to step_us."""
        return sum(row.us for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain form for messages and `--json`, units in key names."""
        rows = [
            {
                "kernel": row.kernel,
                "calls": row.calls,
                "us": round(row.us, 3),
                "bytes": row.bytes,
                "gb_per_s": round(row.gb_per_s, 1),
            }
            for row in self.rows
        ]
        return {
            "rows": rows,
            "sum_us": round(self.sum_us, 3),
            "step_us": round(self.step_us, 3),
            "host_gap_us": round(self.host_gap_us, 3),
            "position": self.position,
            "timer": self.timer,
        }
