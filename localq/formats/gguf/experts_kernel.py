"""Mixtures of experts in GGUF blocks. Checks, then the kernel.

The matrices of the experts lie anywhere: a table on the device has their addresses (csrc/gguf/experts.h). The functions
that take a stack of any format are in `formats.experts.kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kernels
from localq.files.gguf.block_types import by_name
from localq.formats.gguf.kernel import WIDEST, GgufOperand, check_matrix, reads
from localq.formats.table_stack import TableStack
from localq.kernels.checks import HALF_TYPES, TYPES, check, check_cuda, place
from localq.kernels.gemv import ACTIVATIONS, Norm, norm_arguments

ALIGNED = 16  # bytes that a lane loads at once


@dataclass(frozen=True)
class GgufStack(TableStack[GgufOperand]):
    """Experts in blocks, their columns in order; gates of one type, ups of one, which may be another.

    table    i64 [E, parts]: addresses of the blocks
    factors  f32 [E, parts], on the device: multiply the weights; None where all are 1
    """

    factors: Tensor | None = None

    @property
    def types(self) -> tuple[str, ...]:
        """Block types of each part, by ggml's names."""
        return tuple(each.type for each in self.matrices[0])

    @property
    def has_two_types(self) -> bool:
        """True if gates and ups take a launch each."""
        return len(set(self.types)) > 1

    def has_room(self, active: int) -> bool:
        """Return whether the inputs of `active` experts fit in the shared memory of every card."""
        return active * self.in_features <= WIDEST


def gguf_stack(matrices: Sequence[Sequence[GgufOperand]]) -> GgufStack:
    """The stack of matrices [E][1 or 2] without biases, which stay where they are.

    Raises ValueError where they differ in kind, and by the name of a tensor that the kernel cannot read: it is given
    addresses only.
    """
    held = tuple(tuple(each) for each in matrices)
    if not held or {len(each) for each in held} not in ({1}, {2}):
        raise ValueError(f"gguf_stack: {len(held)} experts, each must have one matrix or two")
    first = held[0][0]
    sizes = {(each.out_features, each.in_features) for some in held for each in some}
    types = {tuple(each.type for each in some) for some in held}
    if len(sizes) > 1 or len(types) > 1:
        found = f"matrices of {len(sizes)} sizes and experts of {len(types)} kinds"
        raise ValueError(f"gguf_stack: {found}, must be of one size, and all gates and all ups of one block type")
    for each in (matrix for some in held for matrix in some):
        check_matrix("gguf_stack", each)
        check("gguf_stack", "blocks", each.blocks, first.blocks.device, (torch.uint8,), each.blocks.numel())
        if past := each.blocks.data_ptr() % ALIGNED:
            raise ValueError(f"gguf_stack: blocks = {past}, bytes past an aligned address")
        if each.places is not None:
            raise ValueError("gguf_stack: places must be None: columns of experts lie in order")
        if each.bias is not None:
            raise ValueError("gguf_stack: bias must be None: the kernel adds none")
    table = torch.tensor([[each.blocks.data_ptr() for each in some] for some in held], dtype=torch.int64)
    factors = torch.tensor([[each.factor for each in some] for some in held], dtype=torch.float32)
    device = first.blocks.device
    return GgufStack(held, table.to(device), None if bool((factors == 1).all()) else factors.to(device))


def check_gguf_stack(op: str, stack: GgufStack, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError, naming the tensor, unless the kernel reads it beside x of `dtype` on `device`."""
    if dtype not in HALF_TYPES:
        raise ValueError(f"{op}: x is {dtype}, must be one of {HALF_TYPES}")
    check(op, "table", stack.table, device, (torch.int64,), stack.experts * stack.parts)
    if not all(reads(each) for each in stack.matrices[0]):
        raise ValueError(f"{op}: in = {stack.in_features}, must be at most {WIDEST}")


def gguf_experts_gate_up(
    x: Tensor,
    stack: GgufStack,
    chosen: Tensor,
    *,
    norm: Norm | None,
    out: Tensor,
    gates: Tensor | None = None,
    gate: str = "silu",
) -> None:
    """out T [k, w] = gate(g) * u of norm(x) T [1, in] for every chosen expert i32 [k], in one launch.

    gate: "silu" or "gelu_pytorch_tanh". Of gates and ups of two block types in two: `gates` f32 [k, w] holds the gates
    between them; unused otherwise.
    x, chosen and out were checked by `experts.experts_gate_up`.
    """
    op = "experts_gate_up"
    if stack.parts != 2:
        raise ValueError(f"{op}: the stack has {stack.parts} matrix of an expert, must be gate and up")
    if stack.has_two_types:
        if gates is None:
            raise ValueError(f"{op}: gates is None, experts of two block types ({', '.join(stack.types)}) need them")
        check(op, "gates", gates, x.device, (torch.float32,), out.numel())
    check_cuda(op, "the stack's table", stack.table)
    gate_type, up_type = (by_name(each).number for each in stack.types)
    kernels.module().gguf_experts_gate_up(
        x=x.data_ptr(),
        stack=_stack(stack),
        gate_type=gate_type,
        up_type=up_type,
        **norm_arguments(op, norm, x),
        chosen=chosen.data_ptr(),
        active=chosen.numel(),
        activation=ACTIVATIONS[gate],
        gates=0 if gates is None else gates.data_ptr(),
        y=out.data_ptr(),
        type=TYPES[x.dtype],
        **place(x),
    )


def gguf_experts_down(
    gated: Tensor,
    stack: GgufStack,
    chosen: Tensor,
    weights: Tensor,
    *,
    residual: Tensor | None,
    out: Tensor,
    behind_gate_up: bool = False,
) -> None:
    """out T [1, out] = residual + sum over j of weights[j] gated[j] W^T, W of the expert chosen[j], in one launch.

    Operands were checked by `experts.experts_down`, which says what `behind_gate_up` is.
    """
    op = "experts_down"
    if stack.parts != 1:
        raise ValueError(f"{op}: the stack has {stack.parts} matrices of an expert, must be one")
    check_cuda(op, "the stack's table", stack.table)
    kernels.module().gguf_experts_down(
        x=gated.data_ptr(),
        stack=_stack(stack),
        block_type=by_name(stack.types[0]).number,
        chosen=chosen.data_ptr(),
        weights=weights.data_ptr(),
        active=chosen.numel(),
        residual=0 if residual is None else residual.data_ptr(),
        early=behind_gate_up,
        y=out.data_ptr(),
        type=TYPES[gated.dtype],
        **place(gated),
    )


def _stack(stack: GgufStack) -> dict[str, int]:
    """Return the fields of the stack that csrc/gguf/bind.cpp reads, by name."""
    return {
        "blocks": stack.table.data_ptr(),
        "factors": 0 if stack.factors is None else stack.factors.data_ptr(),
        "experts": stack.experts,
        "parts": stack.parts,
        "out_features": stack.matrices[0][0].out_features,
        "in_features": stack.in_features,
    }
