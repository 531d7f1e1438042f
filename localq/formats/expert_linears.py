"""Experts as Linears of their own, where each has codebooks (AQLM, vq2) or types that may differ (GGUF).

Formats that `join` have the experts of a layer as rows of one matrix (`linear.SlabStack`). These lie where the loader
puts them, matrix by matrix, and `stack` says where, for the kernels that choose among them on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from localq.formats import mxfp4, nf4
from localq.formats.codebooks.experts_kernel import VqStack, vq_stack
from localq.formats.codebooks.lookup_kernel import VqOperand
from localq.formats.experts.stacks import Mxfp4Stack, Nf4Stack, Stack
from localq.formats.gguf.experts_kernel import GgufStack, gguf_stack
from localq.formats.gguf.kernel import GgufOperand
from localq.formats.linear import SlabLinear, SlabStack


class LinearStack(nn.Module):
    """Matrices [count, out_features, in_features]; of each the rows of one Linear, or of gate and then of up.

    stack  as the kernels of a decode step take them; None where no kernel reads the layout, or where they differ
    """

    def __init__(self, linears: Sequence[Sequence[SlabLinear]]) -> None:
        """linears [count][1 or 2], in the order that their kernels read, without biases."""
        super().__init__()
        self.parts = nn.ModuleList(nn.ModuleList(each) for each in linears)
        self.count, first = len(linears), linears[0]
        self.out_features, self.in_features = sum(each.out_features for each in first), first[0].in_features
        self.stack = _stack_of(linears)

    def dequantize(self, first: int, out: Tensor) -> None:
        """Experts `first` and on into `out` T [experts, out, in]: what multiplies inputs that are rotated where there
        are signs."""
        for parts, matrix in zip(self.parts[first:], out, strict=False):
            start = 0
            for linear in parts:  # type: ignore[attr-defined]  # torch's gap
                rows = matrix[start : start + linear.out_features]
                linear.dequantized_rows(0, linear.out_features, out.dtype, rows)
                start += linear.out_features

    @property
    def linears(self) -> list[SlabLinear]:
        """All of them, expert by expert."""
        return [each for each in self.modules() if isinstance(each, SlabLinear)]

    def signs(self) -> tuple[Tensor | None, bool]:
        """Of the rotation of the inputs, which of vq2 may be rotated: those of the first Linear, and whether all have
        the same. Compares on the device and waits for it: for load time."""
        first, *others = (getattr(each, "signs", None) for each in self.linears)
        if first is None:
            return None, all(each is None for each in others)
        return first, all(each is not None and torch.equal(each, first) for each in others)

    def product(self, x: Tensor, index: int, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]: x W^T + bias [out] with the matrix W of that index."""
        y = x.new_empty(x.shape[0], self.out_features)
        start = 0
        for linear in self.parts[index]:  # type: ignore[attr-defined]  # torch's gap
            y[:, start : start + linear.out_features] = linear(x)
            start += linear.out_features
        return y if bias is None else y.add_(bias)


def stack_of(part: object) -> Stack | None:
    """The matrices of a layer's experts as the kernels take them; None for a format that has no kernel."""
    if isinstance(part, Tensor):
        return part.detach()
    if isinstance(part, LinearStack):
        return part.stack
    if not isinstance(part, SlabStack):
        return None
    if isinstance(part.tall, mxfp4.Linear):
        blocks = part.tall.codes.view(part.count, part.out_features, -1, mxfp4.BLOCK // 2)
        return Mxfp4Stack(blocks, part.tall.scales.view(blocks.shape[:3]))
    return Nf4Stack(part.tall.operand(), part.count) if isinstance(part.tall, nf4.Linear) else None


def table_bytes(model: nn.Module) -> int:
    """Device bytes of the tables that say where experts are."""
    stacks = [module.stack for module in model.modules() if isinstance(module, LinearStack) and module.stack]
    factors = (getattr(stack, "factors", None) for stack in stacks)  # of GGUF blocks
    return sum(each.nbytes for each in (*(stack.table for stack in stacks), *factors) if each is not None)


def _stack_of(linears: Sequence[Sequence[SlabLinear]]) -> VqStack | GgufStack | None:
    operands = [[each.operand() for each in some] for some in linears]
    try:
        in_codebooks = [[each for each in some if isinstance(each, VqOperand)] for some in operands]
        if _are_all(in_codebooks, linears):
            return vq_stack(in_codebooks)
        in_blocks = [[each for each in some if isinstance(each, GgufOperand)] for some in operands]
        return gguf_stack(in_blocks) if _are_all(in_blocks, linears) else None
    except ValueError:  # experts of several layouts
        return None


def _are_all(found: Sequence[Sequence[object]], linears: Sequence[Sequence[SlabLinear]]) -> bool:
    return [len(each) for each in found] == [len(each) for each in linears]
