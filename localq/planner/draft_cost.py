"""Memory of a draft model, or of an MTP block, beside the model that it drafts for. Torch-free.

Its weights lie on the device as they are stored. Its KV cache has the bits and the context of the other model's, up to
its own longest context. It prefills in the memory that the other one has for that. An MTP block also shares embedding,
head and tables of positions, and has a ring of the hidden states that it reads (`engine.draft.head`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from localq.files import format_facts
from localq.kv_bits import KvBits
from localq.planner import footprint, slabs
from localq.planner.draft_shape import DraftShape
from localq.planner.growth import Growth, growths, total
from localq.planner.placement import draft_placement

WEIGHTS, CACHE, WORKSPACE = "draft_weights", "draft_kv_cache", "draft_workspace"
COMPONENTS = (WEIGHTS, CACHE, WORKSPACE)
_SHARED = ("scratch", "cublas_workspace", "cuda_context")  # memory that both models use in turn
SPARE_SLOTS = 16  # of the ring, on either side of a pass: more than a step and its drafts overwrite
GRAPHS = "graphs"  # lie outside of the allocator, so those of both models are one component


def parts(shape: DraftShape, kv_bits: KvBits, itemsize: int, chunk: int | None) -> tuple[tuple[str, int, Growth], ...]:
    """(component, fixed bytes, growth) of each of `COMPONENTS`, and of the graphs, which are added to those of the
    other model.

    kv_bits: of the other model; the rest as for `costs.of_placements`.
    """
    arch, placement = shape.arch, draft_placement(shape.arch, kv_bits)
    if shape.is_block:
        placement = replace(placement, embed="host", head="16")  # neither is its own
    weights = _placed_weights(shape) if shape.weights is None else shape.weights
    fixed = footprint.fixed_bytes(arch, shape.format, shape.scheme, weights, placement, itemsize)
    if shape.is_block:
        fixed["tables"] += _tables_of_block(shape, itemsize)
        fixed["step_buffers"] += 2 * itemsize * arch.hidden + 8  # both inputs, and a slot of the ring
    slab = slabs.slab_of(arch, shape.format, itemsize)
    if not shape.on_gpu:
        fixed, slab = {**fixed, "step_buffers": 0, "attention_workspace": 0, GRAPHS: 0}, 0
    grown = growths(arch, placement, itemsize, chunk)
    shared = ("kv_cache", *_SHARED, *(("tables",) if shape.is_block else ()))
    of_rest = [growth for part, growth in grown.items() if part not in shared]
    growing = {CACHE: grown["kv_cache"].up_to(arch.max_context), WORKSPACE: total(of_rest).up_to(arch.max_context)}
    return tuple((part, size, growing.get(part, Growth(0))) for part, size in ledger(fixed, slab).items())


def ring_slots(on_gpu: bool) -> int:
    """Slots of the ring of hidden states: of a pass of a prompt, and to spare."""
    return footprint.prefill_chunk(on_gpu) + 2 * SPARE_SLOTS


def _placed_weights(shape: DraftShape) -> int:
    found = footprint.placed_weights(shape.arch, shape.format, shape.scheme)
    if not shape.is_block:
        return found
    matrix, norms = shape.joint
    return (
        found + format_facts.of_linear(shape.arch, matrix, shape.format).placed_bytes(matrix, shape.scheme) + 2 * norms
    )


def _tables_of_block(shape: DraftShape, itemsize: int) -> int:
    """Bytes of the ring, and of what its two more norms derive from their weights."""
    return itemsize * shape.arch.hidden * ring_slots(shape.on_gpu) + 4 * shape.joint[1]


def ledger(components: Mapping[str, int], slab: int = 0) -> dict[str, int]:
    """Component -> bytes of a draft model, from those of a model by itself and its buffer for dequantized weights."""
    weights = sum(components.get(part, 0) for part in ("weights", "embedding", "head"))
    counted = {"weights", "embedding", "head", "kv_cache", GRAPHS, *_SHARED}
    rest = sum(size for part, size in components.items() if part not in counted)
    found = {WEIGHTS: weights, CACHE: components.get("kv_cache", 0), WORKSPACE: rest + slab}
    return {**found, GRAPHS: components[GRAPHS]} if GRAPHS in components else found
