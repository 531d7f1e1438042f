"""The launches of gated delta nets in a decode step: what reads x, the rule with all around it, the way out.

    qkv     x -> norm -> q, k, v and z behind each other
    delta   b and a of norm(x), convolution, delta rule, norm and gate; the state moves on by the token
    o       + residual (`fused.py`)

A step with drafts replays the accepted tokens of the drafts before, moves the state on by its first token, and keeps
the inputs of the drafted ones. So does the step of one token behind it; a plain step knows nothing of drafts.

The state is updated in place, so a warm-up or a capture leaves one that must be cleared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from localq.engine.step.launch import Launch
from localq.engine.step.operands import known, operand, product_launch
from localq.engine.step.rows import StepBuffers, row_products
from localq.kernels import delta_net
from localq.kernels.delta_net import DeltaWeights
from localq.kernels.gemv import Norm
from localq.kernels.operand import share_tables
from localq.models.gated_delta_net import DeltaShape, GatedDeltaNet
from localq.models.layers import DraftedInputs, LayerState

NOWHERE = 2**62  # position of the first drafted token where there is none


def why_not(shape: DeltaShape) -> str:
    """Return why the kernels cannot run nets of this shape; empty if they can."""
    return delta_net.why_not(shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.kernel)


class DeltaLaunches:
    """Launches of the gated delta nets in a step of `rows` rows, and the buffers that all layers share.

    out   T [rows, value heads * value_dim], the input of the output projection
    """

    def __init__(
        self,
        shape: DeltaShape,
        dtype: torch.dtype,
        position: Tensor,
        buffers: StepBuffers,
        rows: int = 1,
        replays: bool = False,
    ) -> None:
        """position i64 [1]: of the first row. replays: a step of one row replays drafted tokens, too."""
        width, device = shape.value_heads * shape.value_dim, position.device
        self._shape, self._position, self._buffers, self._rows = shape, position, buffers, rows
        self._is_plain = rows == 1 and not replays
        self._inputs = buffers.take("delta_inputs", rows, shape.channels + width, dtype, device)
        self.out = buffers.take("delta_out", rows, width, dtype, device)
        self._workspace = buffers.delta_workspace(shape.key_heads, shape.value_heads, device)
        self._replays: list[Callable[[], None]] = []

    def of(self, part: GatedDeltaNet, x: Tensor, norm: Norm, state: LayerState, drafted: DraftedInputs) -> list[Launch]:
        """out = what the heads of `part` read for norm(x) T [rows, hidden], normed and gated; `state` moves on."""
        out, workspace, weights = self.out, self._workspace, self._weights(part)
        wide = share_tables([known(operand(each)) for each in (part.in_proj_qkv, part.in_proj_z)])
        pair = part.in_proj_b.weight.detach(), part.in_proj_a.weight.detach()
        inputs, gates = torch.split(self._inputs, [self._shape.channels, out.shape[1]], 1)
        operands = (inputs, gates, x, norm, *pair, weights, state.columns, state.matrix)
        if self._is_plain:
            rule = partial(delta_net.delta_decode, *operands, workspace, out=out)
            moved = delta_net.delta_decode_bytes(weights, x.shape[1])
        else:
            rule = partial(delta_net.delta_verify, *operands, drafted, self._position, workspace, out=out)
            moved = delta_net.delta_verify_bytes(weights, x.shape[1], self._rows)
            replay = partial(delta_net.delta_replay, weights, state.columns, state.matrix, drafted, workspace)
            self._replays.append(replay)
        launch = Launch("delta", rule, lambda live: moved)
        if self._rows == 1:
            return [product_launch("qkv", x, wide, self._inputs, norm=norm), launch]
        return [*row_products("qkv", x, wide, self._inputs, self._buffers, norm=norm), launch]

    def end(self) -> list[Launch]:
        """Tell the next launch, behind the last layer, where the drafted tokens of this step begin."""
        if self._rows == 1:
            return []
        first, position = self._workspace.first_drafted, self._position
        return [Launch("delta", lambda: torch.add(position, 1, out=first), lambda live: 16)]

    def forget(self) -> None:
        """Let the next step replay nothing."""
        self._workspace.first_drafted.fill_(NOWHERE)

    def replay(self, count: int) -> None:
        """Move all states on by the first `count` drafted tokens, without a step."""
        torch.add(self._workspace.first_drafted, count, out=self._workspace.accepted)
        for replay in self._replays:
            replay()

    def _weights(self, part: GatedDeltaNet) -> DeltaWeights:
        found = self._buffers.delta_weights
        if part.layer not in found:
            taps = part.conv1d.weight.detach().view(self._shape.channels, self._shape.kernel)
            rates, offsets = -part.A_log.detach().float().exp(), part.dt_bias.detach().float().clone()
            norm = part.norm.weight.detach()
            found[part.layer] = DeltaWeights(taps, rates, offsets, norm, part.norm.eps, self._shape.key_heads)
        return found[part.layer]
