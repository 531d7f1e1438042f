"""Shared experts on a GPU: appended to the stacks of the routed experts if they have the same width and format.

The launches of the chosen experts then compute them too (`engine.step.fused_experts`), and no weight is stored twice. A
shared expert of another width or format stays a separate MLP: in NF4 files that leave it in 16 bit, and in codebooks,
where its matrices are rotated and those of the routed experts are not.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from localq.engine.load.expert_pieces import LINEARS, ExpertPiece, ExpertPieces
from localq.engine.load.stacks import AnyStack, JoinedStack
from localq.engine.load.weights import Assignment, QuantizedSource
from localq.formats.checkpoint import Checkpoint
from localq.formats.experts import kernel as expert_kernel
from localq.models.decoder import Decoder
from localq.models.experts import Experts, SharedExpertMixture, StackedExpert
from localq.models.layers import ACTIVATIONS, GatedMLP

PARTS = Experts.parts


def append(model: Decoder, assignment: Assignment, checkpoint: Checkpoint) -> Assignment:
    """Append the shared experts of `model` (on the meta device) to the stacks of their layers, where possible.

    `assignment` is that of `weights.assign`; returns the one for the changed model.
    """
    changed = replace(
        assignment, dense={**assignment.dense}, quantized={**assignment.quantized}, stacks={**assignment.stacks}
    )
    for path, mixture in model.named_modules():
        if not isinstance(mixture, SharedExpertMixture) or not _is_alike(mixture):
            continue
        joined = {leaf: _join(path, leaf, mixture.experts, changed, checkpoint, model.transposed) for leaf in PARTS}
        stacks = {f"{path}.experts.{leaf}": stack for leaf, stack in joined.items() if stack is not None}
        if len(stacks) < len(PARTS):
            continue
        for leaf, parts in PARTS.items():
            changed.dense.pop(f"{path}.experts.{leaf}", None)
            for part in parts:
                changed.dense.pop(_parameter(path, part), None)
                changed.quantized.pop(_parameter(path, part).removesuffix(".weight"), None)
            _, *of_one = getattr(mixture.experts, leaf).shape
            size = (mixture.experts.count + 1, *of_one)
            setattr(mixture.experts, leaf, nn.Parameter(torch.empty(size, device="meta"), False))
        changed.stacks.update(stacks)
        mixture.experts.stacked = mixture.experts.count + 1
        mixture.shared_expert = StackedExpert(mixture.experts)
    return changed


def _is_alike(mixture: SharedExpertMixture) -> bool:
    """Return whether the shared expert has the routed ones' shape, and a launch has room for one more."""
    experts, shared = mixture.experts, mixture.shared_expert
    if not isinstance(shared, GatedMLP) or shared.activation is not ACTIVATIONS["silu"] or experts.gate != "silu":
        return False
    has_bias = any(each.bias is not None for each in (*shared.inputs(), shared.down_proj)) or any(
        bias is not None for bias in (experts.gate_up_proj_bias, experts.down_proj_bias)
    )
    active = mixture.router.active + 1
    fits = active <= expert_kernel.MOST_CHOSEN and expert_kernel.has_room_for(experts.width, active)
    same = shared.down_proj.in_features == experts.width and not experts.interleaved and len(shared.inputs()) == 2
    return fits and same and not has_bias


def _parameter(path: str, part: str) -> str:
    return f"{path}.shared_expert.{part}.weight"


def _join(
    path: str, leaf: str, experts: Experts, of: Assignment, checkpoint: Checkpoint, transposed: frozenset[str]
) -> AnyStack | None:
    """The stack `leaf` with the matrices of the shared expert appended; None if their formats differ."""
    target, parts = f"{path}.experts.{leaf}", PARTS[leaf]
    names = [_parameter(path, part) for part in parts]
    dense = tuple(of.dense[name] for name in names if name in of.dense)
    if target in of.dense:
        joined = len(dense) == len(parts) and target not in transposed
        return JoinedStack(of.dense[target], dense) if joined else None
    stack = of.stacks[target]
    if not isinstance(stack, ExpertPieces) or stack.format in LINEARS:
        return None
    sources = [of.quantized.get(name.removesuffix(".weight")) for name in names]
    formats = {None if each is None else each.format for each in sources}
    if formats != {stack.format} or (stack.format is None and len(dense) < len(parts)):
        return None
    added = {
        (experts.count, part): _piece(source, of.dense.get(name))
        for part, name, source in zip(parts, names, sources, strict=True)
    }
    pieces = {**stack.pieces, **added}
    keys = (*stack.keys, *(key for piece in added.values() for key in piece.keys))
    shared = dict.fromkeys((*stack.shared, *(key for each in sources if each is not None for key in each.shared)))
    return ExpertPieces(stack.name, pieces, keys, tuple(shared))


def _piece(source: QuantizedSource | None, dense: str | None) -> ExpertPiece:
    """A matrix of the shared expert as one of a stack."""
    if source is not None:
        return ExpertPiece(source.prefix, source.keys, source.format)
    assert dense is not None
    return ExpertPiece(dense.removesuffix(".weight"), (dense,), None)
