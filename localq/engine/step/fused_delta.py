"""The launches of gated delta nets in a decode step: what reads x, the rule with all around it, the way out.

    qkv     x -> norm -> q, k, v and z behind each other
    delta   b and a of norm(x), convolution, delta rule, norm and gate; the state moves on by the token
    o       + residual (`fused.py`)

The state is updated in place, so a warm-up or a capture leaves one that must be cleared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localq.engine.step.launch import Launch
from localq.engine.step.operands import known, operand, product_launch
from localq.kernels import delta_net
from localq.kernels.delta_net import DeltaWeights
from localq.kernels.gemv import Norm
from localq.kernels.operand import share_tables
from localq.models.gated_delta_net import DeltaShape, GatedDeltaNet
from localq.models.layers import LayerState


def why_not(shape: DeltaShape) -> str:
    """Why the kernels cannot run nets of this shape; empty when they can."""
    return delta_net.why_not(shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.kernel)


class DeltaLaunches:
    """What the gated delta nets of all layers share: buffers, allocated at once, and how their launches are made.

    out   T [1, value heads * value_dim], what the way out reads
    """

    def __init__(self, shape: DeltaShape, dtype: torch.dtype, device: torch.device) -> None:
        width = shape.value_heads * shape.value_dim
        self._shape = shape
        self._inputs = torch.zeros(1, shape.channels + width, dtype=dtype, device=device)
        self.out = torch.zeros(1, width, dtype=dtype, device=device)
        self._workspace = delta_net.DeltaWorkspace(shape.key_heads, shape.value_heads, device)
        self._derived: list[Tensor] = []

    def bytes(self) -> int:
        """Device memory of the buffers, and of what is derived from the weights of a layer."""
        own = sum(each.nbytes for each in (self._inputs, self.out, *self._derived))
        return own + self._workspace.bytes()

    def of(self, part: GatedDeltaNet, x: Tensor, norm: Norm, state: LayerState) -> list[Launch]:
        """out = what the heads of `part` read for norm(x) T [1, hidden], normed and gated; `state` moves on."""
        shape, out, workspace = self._shape, self.out, self._workspace
        wide = share_tables([known(operand(each)) for each in (part.in_proj_qkv, part.in_proj_z)])
        rows = part.in_proj_b.weight.detach(), part.in_proj_a.weight.detach()
        inputs, gates = torch.split(self._inputs, [shape.channels, out.shape[1]], 1)
        weights = self._weights(part)

        def rule() -> None:
            delta_net.delta_decode(
                inputs, gates, x, norm, *rows, weights, state.columns, state.matrix, workspace, out=out
            )

        moved = delta_net.delta_decode_bytes(weights, x.shape[1])
        return [
            product_launch("qkv", x, wide, self._inputs, norm=norm),
            Launch("delta", rule, lambda live: moved),
        ]

    def _weights(self, part: GatedDeltaNet) -> DeltaWeights:
        taps = part.conv1d.weight.detach().view(self._shape.channels, self._shape.kernel)
        rates, offsets = -part.A_log.detach().float().exp(), part.dt_bias.detach().float().clone()
        self._derived += [rates, offsets]
        return DeltaWeights(taps, rates, offsets, part.norm.weight.detach(), part.norm.eps, self._shape.key_heads)
