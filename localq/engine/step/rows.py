"""Additions for steps of several rows: their buffers, and launches for work that products do not include.

Products take several rows of x, but no norm and no rotation of x in their prologue, and one format in a launch: so x is
normed, rotated and the results put beside each other by launches of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from localq.engine.step.launch import Launch
from localq.engine.step.operands import product_launch, runs
from localq.formats.codebooks import rotation_kernel
from localq.formats.codebooks.lookup_kernel import VqOperand
from localq.kernels import attention, delta_net, rmsnorm
from localq.kernels.delta_net import DeltaWeights, DeltaWorkspace
from localq.kernels.gemv import Norm
from localq.kernels.operand import Operand


class StepBuffers:
    """Buffers of steps of up to `most` rows, of which one runs at a time; allocated when they are first taken.

    delta_weights   layer -> what its gated delta net has beside its matrices, with what is derived from weights
    """

    def __init__(self, most: int = 1) -> None:
        self.most = most
        self._taken: dict[tuple[str, int, torch.dtype], Tensor] = {}
        self._shared: dict[str, Tensor] = {}
        self._attention: dict[attention.Shape, attention.AttentionWorkspace] = {}
        self._delta: DeltaWorkspace | None = None
        self.delta_weights: dict[int, DeltaWeights] = {}

    def take(self, name: str, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return [rows, width], zeros at first; the same memory for the same name, width and dtype."""
        key = name, width, dtype
        if key not in self._taken:
            self._taken[key] = torch.zeros(self.most, width, dtype=dtype, device=device)
        return self._taken[key][:rows]

    def shared(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of this shape, zeros at first; the same memory for the same name."""
        if name not in self._shared:
            self._shared[name] = torch.zeros(shape, dtype=dtype, device=device)
        return self._shared[name]

    def attention_workspaces(
        self, shapes: Sequence[attention.Shape], device: torch.device
    ) -> dict[attention.Shape, attention.AttentionWorkspace]:
        """Return the workspaces of attention by shape, which all steps and layers share."""
        if not self._attention:
            self._attention = attention.workspaces(shapes, device, self.most)
        return self._attention

    def delta_workspace(self, key_heads: int, value_heads: int, device: torch.device) -> DeltaWorkspace:
        """Return the workspace of gated delta nets, which all steps share."""
        if self._delta is None:
            self._delta = delta_net.DeltaWorkspace(key_heads, value_heads, device, self.most)
        return self._delta

    def bytes(self) -> int:
        """Device memory of the buffers (without the workspace of attention)."""
        derived = sum(each.rates.nbytes + each.offsets.nbytes for each in self.delta_weights.values())
        workspace = 0 if self._delta is None else self._delta.bytes()
        buffers = (*self._taken.values(), *self._shared.values())
        return sum(each.nbytes for each in buffers) + derived + workspace


def products(
    operation: str,
    x: Tensor,
    operands: Sequence[Operand],
    out: Tensor,
    buffers: StepBuffers,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> list[Launch]:
    """`operands.product` for one row of x, or several: out [rows, sum of outs]."""
    if x.shape[0] > 1:
        return row_products(operation, x, operands, out, buffers, norm=norm, residual=residual, activation=activation)
    return [product_launch(operation, x, operands, out, norm=norm, residual=residual, activation=activation)]


def products_beside(
    operation: str, x: Tensor, operands: Sequence[Operand], out: Tensor, buffers: StepBuffers, norm: Norm | None
) -> list[Launch]:
    """The same where other columns lie between the rows of `out`."""
    if out.is_contiguous():
        return products(operation, x, operands, out, buffers, norm=norm)
    own = buffers.take("beside", out.shape[0], out.shape[1], out.dtype, out.device)
    return [*products(operation, x, operands, own, buffers, norm=norm), _copy(operation, own, out)]


def row_products(
    operation: str,
    x: Tensor,
    operands: Sequence[Operand],
    out: Tensor,
    buffers: StepBuffers,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> list[Launch]:
    """`operands.product` for several rows of x: out [rows, sum of outs]."""
    found: list[Launch] = []
    rows = x.shape[0]
    if norm is not None:
        x, launch = _normed(operation, x, norm, buffers)
        found.append(launch)
    parts, start = runs(operands), 0
    for part in parts:
        turned, part = _rotated(operation, x, part, buffers, found)
        if len(parts) == 1:
            found.append(product_launch(operation, turned, part, out, residual=residual, activation=activation))
            break
        width = sum(each.out_features for each in part)
        own = buffers.take("apart", rows, width, out.dtype, out.device)
        found += [product_launch(operation, turned, part, own), _copy(operation, own, out[:, start : start + width])]
        start += width
    return found


def _normed(operation: str, x: Tensor, norm: Norm, buffers: StepBuffers) -> tuple[Tensor, Launch]:
    rows, width = x.shape
    out = buffers.take("normed", rows, width, x.dtype, x.device)
    moved = rmsnorm.rmsnorm_bytes(rows, width, offset=norm.weight.dtype == torch.float32)
    return out, Launch(operation, lambda: rmsnorm.rmsnorm(x, norm, out=out), lambda live: moved)


def _rotated(
    operation: str, x: Tensor, part: list[Operand], buffers: StepBuffers, found: list[Launch]
) -> tuple[Tensor, list[Operand]]:
    """x as `part` multiplies it, and `part` for such an x; adds the launch that rotates x, if it is rotated."""
    first = part[0]
    if not isinstance(first, VqOperand) or first.signs is None:
        return x, part
    rows, width = x.shape
    signs, out = first.signs, buffers.take("rotated", rows, width, x.dtype, x.device)
    moved = rotation_kernel.hadamard_bytes(rows, width)
    found.append(Launch(operation, lambda: rotation_kernel.hadamard(x, signs, out=out), lambda live: moved))
    return out, [replace(each, signs=None) for each in part if isinstance(each, VqOperand)]


def _copy(operation: str, source: Tensor, out: Tensor) -> Launch:
    return Launch(operation, lambda: out.copy_(source), lambda live: source.nbytes + out.numel() * out.element_size())
