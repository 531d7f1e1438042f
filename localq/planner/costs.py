"""Bytes of every placement that a load may have, counted once for each model, format and set of wishes. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from localq.files.architecture import Architecture
from localq.planner import draft_cost, footprint
from localq.planner.draft_shape import DraftShape
from localq.planner.growth import Growth, growths, total
from localq.planner.placement import Placement, Wishes

CONTEXT_STEP = 64  # tokens; chosen contexts are multiples of this

# Weights of the blocks with norms; embedding and head; the KV cache, with the dequantized copy for prefill if it is
# quantized; tables of positions; memory of prefill; memory of a decode step; a draft model (`draft_cost`); memory of
# CUDA and its libraries.
COMPONENTS = (
    *("weights", "embedding", "head", "kv_cache", "tables", "scratch", "step_buffers", "attention_workspace"),
    *("sampler", *draft_cost.COMPONENTS, "cublas_workspace", "graphs", "cuda_context"),
)
_NONE = Growth(0)
_ON_GPU_ONLY = ("step_buffers", "attention_workspace", "cublas_workspace", "graphs")


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """The bytes of one placement: fixed, and as they grow with the context.

    fixed_parts, growing_parts  component -> fixed bytes, and its growth; none where there is no entry
    is_reduced  whether replies may differ from those of the first placement: head or KV cache have fewer bits
    has_free_next  whether the next placement gives the same replies and needs less
    choice      what the planner reduces, as `Wishes.choice`
    """

    placement: Placement
    fixed_parts: Mapping[str, int]
    growing_parts: Mapping[str, Growth]
    fixed: int
    growth: Growth
    is_reduced: bool
    has_free_next: bool
    choice: str

    @property
    def components(self) -> tuple[tuple[str, int, Growth], ...]:
        """Name, fixed bytes (0 for CUDA) and growth of each of `COMPONENTS`, and of parts that are in no GPU."""
        known, growing = self.fixed_parts, self.growing_parts
        names = (*COMPONENTS, *(part for part in known if part not in COMPONENTS))
        return tuple((part, known.get(part, 0), growing.get(part, _NONE)) for part in names)

    def context(self, free_bytes: int, limit: int) -> int:
        """Tokens that fit in `free_bytes`, at most `limit`; a multiple of `CONTEXT_STEP` below it; 0 if none."""
        largest = self.growth.context(free_bytes - self.fixed)
        if largest >= limit:
            return limit
        return largest if largest < CONTEXT_STEP else largest - largest % CONTEXT_STEP


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
    placements = wishes.placements(arch)
    weights = footprint.placed_weights(arch, format, scheme) if weights is None else weights
    by_bits = {each.kv_bits: each for each in placements}
    grown = {bits: growths(arch, each, itemsize, chunk) for bits, each in by_bits.items()}
    totals = {bits: total(each.values()) for bits, each in grown.items()}
    of_draft = {  # once for all placements with one cache
        (each.kv_bits, each.rows): _drafting(wishes.draft, each, itemsize, chunk)
        for each in {(each.kv_bits, each.rows): each for each in placements}.values()
    }
    found = []
    for number, placement in enumerate(placements):
        fixed = footprint.fixed_bytes(arch, format, scheme, weights, placement, itemsize)
        growing = grown[placement.kv_bits]
        whole = totals[placement.kv_bits]
        if drafting := of_draft[placement.kv_bits, placement.rows]:
            fixed |= {part: fixed.get(part, 0) + size for part, size, _ in drafting}  # the graphs of both
            growing = {**growing, **{part: each for part, _, each in drafting}}
            whole = total(growing.values())
        is_reduced = not placement.is_as_good_as(placements[0])
        has_free_next = number + 1 < len(placements) and placements[number + 1].is_as_good_as(placement)
        sums = sum(fixed.values()), whole
        choice = wishes.choice(placement, arch)
        found.append(PlacementCost(placement, fixed, growing, *sums, is_reduced, has_free_next, choice))
    return tuple(found)


def growth(
    arch: Architecture, placement: Placement, draft: DraftShape | None, itemsize: int, chunk: int | None
) -> Growth:
    """The growth of all components; the rest as for `of_placements`."""
    drafting = (each for _, _, each in _drafting(draft, placement, itemsize, chunk))
    return total([*growths(arch, placement, itemsize, chunk).values(), *drafting])


def _drafting(
    draft: DraftShape | None, placement: Placement, itemsize: int, chunk: int | None
) -> tuple[tuple[str, int, Growth], ...]:
    """`draft_cost.parts` of the draft model, if there is one and the model verifies drafts."""
    if draft is None or placement.rows == 1:
        return ()
    return draft_cost.parts(draft, placement.kv_bits, itemsize, chunk)


def on_cpu(cost: PlacementCost, process: int) -> PlacementCost:
    """The cost without what only a GPU needs, with `process` bytes for the engine process, which is in RAM too."""
    fixed = {part: size for part, size in cost.fixed_parts.items() if part not in _ON_GPU_ONLY} | {"process": process}
    growing = {part: each for part, each in cost.growing_parts.items() if part not in _ON_GPU_ONLY}
    return replace(cost, fixed_parts=fixed, growing_parts=growing, fixed=sum(fixed.values()))
