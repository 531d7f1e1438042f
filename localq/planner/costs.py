"""Bytes of every placement that a load may have, counted once for each model, format and set of wishes. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from localq.files.architecture import Architecture
from localq.planner import footprint
from localq.planner.placement import Placement, Wishes

CONTEXT_STEP = 64  # tokens; chosen contexts are multiples of this

# Weights of the blocks with norms; embedding and head; the KV cache, with the dequantized copy for prefill if it is
# quantized; tables of positions; memory of prefill; memory of a decode step; memory of CUDA and its libraries.
COMPONENTS = (
    *("weights", "embedding", "head", "kv_cache", "tables", "scratch", "step_buffers", "attention_workspace"),
    *("sampler", "cublas_workspace", "graphs", "cuda_context"),
)
_ON_GPU_ONLY = ("step_buffers", "attention_workspace", "cublas_workspace", "graphs")


@dataclass(frozen=True, slots=True)
class Growth:
    """How bytes grow with the context.

    per_token   per token
    windowed    per token of the first `slots`: the capacity of windows that slide
    """

    per_token: int
    windowed: int = 0
    slots: int = 0

    def bytes(self, context: int) -> int:
        """Bytes of a context of so many tokens."""
        return context * self.per_token + min(context, self.slots) * self.windowed

    def context(self, free_bytes: int) -> int:
        """The largest context that fits in `free_bytes`; 0 if none does."""
        largest = free_bytes // (self.per_token + self.windowed)
        if largest > self.slots:
            largest = (free_bytes - self.slots * self.windowed) // self.per_token
        return max(largest, 0)


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """The bytes of one placement: fixed, and as they grow with the context.

    components  of each of `COMPONENTS`: its name, fixed bytes (0 for CUDA), and its growth
    is_reduced  whether replies may differ from those of the first placement: head or KV cache have fewer bits
    has_free_next  whether the next placement gives the same replies and needs less
    choice      what the planner reduces, as `Wishes.choice`
    """

    placement: Placement
    components: tuple[tuple[str, int, Growth], ...]
    fixed: int
    growth: Growth
    is_reduced: bool
    has_free_next: bool
    choice: str

    def context(self, free_bytes: int, limit: int) -> int:
        """Tokens that fit in `free_bytes`, at most `limit`; a multiple of `CONTEXT_STEP` below it; 0 if none."""
        largest = self.growth.context(free_bytes - self.fixed)
        if largest >= limit:
            return limit
        return largest if largest < CONTEXT_STEP else largest - largest % CONTEXT_STEP


def growths(arch: Architecture, placement: Placement, itemsize: int, chunk: int | None) -> dict[str, Growth]:
    """Component -> how it grows; chunk as of `footprint.window_chunk`."""
    growing = footprint.per_token_bytes(arch, placement, itemsize, chunk)
    windowed = footprint.windowed_bytes(arch, placement, itemsize, chunk)
    slots = 0 if chunk is None else arch.window + chunk
    return {part: Growth(growing.get(part, 0), windowed.get(part, 0), slots) for part in growing}


def total(growths: Iterable[Growth]) -> Growth:
    """The growth of all together; their windows have the same capacity."""
    known = [*growths]
    slots = max((each.slots for each in known), default=0)
    return Growth(sum(each.per_token for each in known), sum(each.windowed for each in known), slots)


@functools.lru_cache(maxsize=1024)
def of_placements(
    arch: Architecture,
    format: str,
    scheme: str,
    weights: int | None,
    wishes: Wishes,
    itemsize: int,
    chunk: int | None = None,
) -> tuple[PlacementCost, ...]:
    """The cost of each placement of `wishes`, in their order; `weights` as in `footprint.fixed_bytes`.

    chunk as of `footprint.window_chunk`. Raises LocalqError (exit 2) for wishes that this shape does not support.
    """
    wishes.check(arch)
    placements, none = wishes.placements(arch), Growth(0)
    weights = footprint.placed_weights(arch, format, scheme) if weights is None else weights
    by_bits = {each.kv_bits: each for each in placements}
    grown = {bits: growths(arch, each, itemsize, chunk) for bits, each in by_bits.items()}
    found = []
    for number, placement in enumerate(placements):
        fixed = footprint.fixed_bytes(arch, format, scheme, weights, placement, itemsize)
        growing = grown[placement.kv_bits]
        parts = tuple((part, fixed.get(part, 0), growing.get(part, none)) for part in COMPONENTS)
        is_reduced = not placement.is_as_good_as(placements[0])
        has_free_next = number + 1 < len(placements) and placements[number + 1].is_as_good_as(placement)
        sums = sum(fixed.values()), total(growing.values())
        found.append(PlacementCost(placement, parts, *sums, is_reduced, has_free_next, wishes.choice(placement)))
    return tuple(found)


def on_cpu(cost: PlacementCost, process: int) -> PlacementCost:
    """The cost without what only a GPU needs, with `process` bytes for the engine process, which is in RAM too."""
    none = Growth(0)
    parts = tuple(
        (part, *((0, none) if part in _ON_GPU_ONLY else (fixed, growth))) for part, fixed, growth in cost.components
    )
    parts = (*parts, ("process", process, none))
    return replace(cost, components=parts, fixed=sum(fixed for _, fixed, _ in parts))
