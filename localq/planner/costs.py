"""Bytes of every placement that a load may have, counted once for each model, format and set of wishes. Torch-free."""

from __future__ import annotations

import functools
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
class PlacementCost:
    """The bytes of one placement: fixed, and per token of the context.

    components  of each of `COMPONENTS`: its name, fixed bytes (0 for CUDA), bytes per token
    is_reduced  whether replies may differ from those of the first placement: head or KV cache have fewer bits
    has_free_next  whether the next placement gives the same replies and needs less
    choice      what the planner reduces, as `Wishes.choice`
    """

    placement: Placement
    components: tuple[tuple[str, int, int], ...]
    fixed: int
    per_token: int
    is_reduced: bool
    has_free_next: bool
    choice: str

    def context(self, free_bytes: int, limit: int) -> int:
        """Tokens that fit in `free_bytes`, at most `limit`; a multiple of `CONTEXT_STEP` below it; 0 if none."""
        largest = (free_bytes - self.fixed) // self.per_token
        if largest >= limit:
            return limit
        return max(largest, 0) if largest < CONTEXT_STEP else largest - largest % CONTEXT_STEP


@functools.lru_cache(maxsize=1024)
def of_placements(
    arch: Architecture, format: str, scheme: str, weights: int | None, wishes: Wishes, itemsize: int
) -> tuple[PlacementCost, ...]:
    """The cost of each placement of `wishes`, in their order; `weights` as in `footprint.fixed_bytes`.

    Raises LocalqError (exit 2) for wishes that this shape does not support.
    """
    wishes.check(arch)
    placements = wishes.placements(arch)
    found = []
    for number, placement in enumerate(placements):
        fixed = footprint.fixed_bytes(arch, format, scheme, weights, placement, itemsize)
        growth = footprint.per_token_bytes(arch, placement, itemsize)
        parts = tuple((part, fixed.get(part, 0), growth.get(part, 0)) for part in COMPONENTS)
        is_reduced = not placement.is_as_good_as(placements[0])
        has_free_next = number + 1 < len(placements) and placements[number + 1].is_as_good_as(placement)
        sums = sum(fixed.values()), sum(growth.values())
        found.append(PlacementCost(placement, parts, *sums, is_reduced, has_free_next, wishes.choice(placement)))
    return tuple(found)


def on_cpu(cost: PlacementCost, process: int) -> PlacementCost:
    """The cost without what only a GPU needs, with `process` bytes for the engine process, which is in RAM too."""
    parts = tuple((part, *((0, 0) if part in _ON_GPU_ONLY else sizes)) for part, *sizes in cost.components)
    parts = (*parts, ("process", process, 0))
    return replace(cost, components=parts, fixed=sum(fixed for _, fixed, _ in parts))
