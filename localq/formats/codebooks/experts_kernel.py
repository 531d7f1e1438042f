"""Mixtures of experts in additive codebooks of 256 codewords: vq2, and AQLM's 1x8 and 2x8. Checks, then the kernel.

The matrices of the experts lie anywhere: a table on the device says where (csrc/lookup/experts.h). The functions that
take a stack of any format are in `formats.experts.kernel`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kernels
from localq.formats.codebooks.lookup_kernel import (
    BOOKS,
    VqOperand,
    check_signs,
    check_tensors,
    matrix_arguments,
)
from localq.formats.table_stack import TableStack
from localq.kernels.checks import HALF_TYPES, TYPES, check, check_cuda, place
from localq.kernels.gemv import Norm, norm_arguments
from localq.kernels.workspace import workspace_of

WORDS = 6  # of 8 bytes, of a matrix in the table: csrc/lookup/experts.h, VqPlace
LOADED = 16  # bytes of codes and of codewords that a lane loads at once


@dataclass(frozen=True)
class VqStack(TableStack[VqOperand]):
    """Experts with books of the same strides and steps; each matrix counts with codebooks of its own.

    table   i64 [E, parts, 6]
    shared  gate and up of every expert have the same fragments
    """

    shared: bool


def vq_stack(matrices: Sequence[Sequence[VqOperand]]) -> VqStack:
    """The stack of matrices [E][1 or 2], which stay where they are. Raises ValueError where they differ in kind, and by
    the name of a tensor that the kernel cannot read: it meets addresses only, and a launch sees but the first."""
    held = tuple(tuple(each) for each in matrices)
    if not held or {len(each) for each in held} not in ({1}, {2}):
        raise ValueError(f"vq_stack: {len(held)} experts, each must have one matrix or two")
    kinds = {_kind(matrix) for each in held for matrix in each}
    if len(kinds) > 1:
        raise ValueError(f"vq_stack: matrices of {len(kinds)} kinds, must be of one size and like books")
    for each in held:
        for matrix in each:
            check_tensors("vq_stack", matrix, held[0][0].codes.device)
            _check_aligned(matrix)
    words = torch.tensor([[_words(matrix) for matrix in each] for each in held], dtype=torch.int64)
    shared = all(_fragments(each[0]) == _fragments(each[-1]) for each in held)
    return VqStack(held, words.to(held[0][0].codes.device), shared)


def check_vq_stack(op: str, stack: VqStack, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError, naming the tensor, unless the kernel reads it beside x of `dtype` on `device`."""
    like = stack.matrices[0][0]
    if dtype not in HALF_TYPES:
        raise ValueError(f"{op}: x is {dtype}, must be one of {HALF_TYPES}")
    if not 1 <= len(like.books) <= BOOKS:
        raise ValueError(f"{op}: {len(like.books)} books, must be 1 or {BOOKS}")
    check(op, "table", stack.table, device, (torch.int64,), stack.experts * stack.parts * WORDS)
    check_tensors(op, like, device)


def vq_experts_gate_up(x: Tensor, stack: VqStack, chosen: Tensor, *, norm: Norm | None, out: Tensor) -> None:
    """out T [k, w] = silu(g) * u of norm(x) T [1, in] for every chosen expert i32 [k], in one launch.

    x, chosen and out were checked by `experts.experts_gate_up`.
    """
    op = "experts_gate_up"
    if stack.parts != 2:
        raise ValueError(f"{op}: the stack has {stack.parts} matrix of an expert, must be gate and up")
    check_cuda(op, "the stack's table", stack.table)
    kernels.module().vq_experts_gate_up(
        x=x.data_ptr(),
        stack=_stack(stack),
        workspace=workspace_of(x.device).arguments,
        chosen=chosen.data_ptr(),
        active=chosen.numel(),
        y=out.data_ptr(),
        type=TYPES[x.dtype],
        **norm_arguments(op, norm, x),
        **place(x),
    )


def vq_experts_down(
    gated: Tensor,
    stack: VqStack,
    chosen: Tensor,
    weights: Tensor,
    *,
    residual: Tensor | None,
    out: Tensor,
    signs: Tensor | None = None,
) -> None:
    """out T [1, out] = residual + sum over j of weights[j] gated[j] W^T, W of the expert chosen[j], in one launch.

    Operands were checked by `experts.experts_down`. With `signs` u8 [w / 8] every row of gated T [k, w] is rotated
    before it is multiplied, bit for bit as by `rotation_kernel.hadamard`.
    """
    op = "experts_down"
    if stack.parts != 1:
        raise ValueError(f"{op}: the stack has {stack.parts} matrices of an expert, must be one")
    if signs is not None:
        check_signs(op, signs, gated[:1])
    check_cuda(op, "the stack's table", stack.table)
    kernels.module().vq_experts_down(
        x=gated.data_ptr(),
        stack=_stack(stack),
        workspace=workspace_of(gated.device).arguments,
        chosen=chosen.data_ptr(),
        weights=weights.data_ptr(),
        active=chosen.numel(),
        residual=0 if residual is None else residual.data_ptr(),
        signs=0 if signs is None else signs.data_ptr(),
        y=out.data_ptr(),
        type=TYPES[gated.dtype],
        **place(gated),
    )


def _stack(stack: VqStack) -> dict[str, object]:
    """The fields that csrc/lookup/bind.cpp reads, by name; all matrices are like the first."""
    like = matrix_arguments(stack.matrices[0][0])
    return {"like": like, "places": stack.table.data_ptr(), "experts": stack.experts, "shared": stack.shared}


def _kind(matrix: VqOperand) -> tuple[object, ...]:
    """Equal for matrices that one stack can have."""
    books = tuple((book.stride, book.steps, book.before, book.tile_positions) for book in matrix.books)
    return books, matrix.out_features, matrix.in_features, matrix.scales.dtype, matrix.codes.device


def _check_aligned(matrix: VqOperand) -> None:
    for book in matrix.books:
        for name, tensor in (("codes", book.codes), ("fragments", book.fragments)):
            if past := tensor.data_ptr() % LOADED:
                raise ValueError(f"vq_stack: {name} = {past}, bytes past an aligned address")


def _fragments(matrix: VqOperand) -> tuple[int, ...]:
    return tuple(book.fragments.data_ptr() for book in matrix.books)


def _words(matrix: VqOperand) -> list[int]:
    """A matrix as csrc/lookup/experts.h, VqPlace, has it."""
    spare = [0] * (BOOKS - len(matrix.books))
    factor = ctypes.c_uint32.from_buffer(ctypes.c_float(matrix.factor)).value
    codes = [book.codes.data_ptr() for book in matrix.books]
    return [*codes, *spare, *_fragments(matrix), *spare, matrix.scales.data_ptr(), factor]
