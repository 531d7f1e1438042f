"""Experts as Linears of their own, where each has codebooks (AQLM, vq2) or types that may differ (GGUF).

Formats that `join` have the experts of a layer as rows of one matrix (`linear.SlabStack`). These lie where the loader
puts them, matrix by matrix, and `stack` says where, for the kernels that choose among them on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from localq.formats.codebooks.experts_kernel import VqStack, vq_stack
from localq.formats.codebooks.linear import VqLinear
from localq.formats.linear import SlabLinear


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


def table_bytes(model: nn.Module) -> int:
    """Device bytes of the tables that say where experts are."""
    stacks = (module.stack for module in model.modules() if isinstance(module, LinearStack))
    return sum(stack.table.nbytes for stack in stacks if stack is not None)


def _stack_of(linears: Sequence[Sequence[SlabLinear]]) -> VqStack | None:
    matrices = [[each.tiles if isinstance(each, VqLinear) else None for each in some] for some in linears]
    known = [[each for each in some if each is not None] for some in matrices]
    if [len(each) for each in known] != [len(each) for each in linears]:
        return None
    try:
        return vq_stack(known)
    except ValueError:  # experts of several layouts
        return None
