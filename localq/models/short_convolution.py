"""The short convolution of LFM2: a layer that mixes each token with the few before it, channel by channel.

After transformers' models/lfm2/modeling_lfm2.py. One matrix makes three parts of x: B, C and V. The causal convolution
sees B * V of the last tokens, and C multiplies what it gives. The state is its last inputs, and no matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from localq.files.layer_caches import RecurrentState
from localq.models.attention import Pass
from localq.models.layers import DraftedInputs, LayerState, Linear, RecurrentMixer
from localq.models.recurrent import causal_sum


@dataclass(frozen=True)
class ConvolutionShape:
    """channels: of the stream; kernel: tokens that the convolution sees; bias: of its linears and its own."""

    channels: int
    kernel: int
    bias: bool

    @property
    def cache(self) -> RecurrentState:
        """The cache of one layer."""
        return RecurrentState(0, 0, 0, self.channels, self.kernel - 1)


class CausalConvolution(nn.Module):
    """A causal convolution of every channel by itself."""

    def __init__(self, channels: int, kernel: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs [kernel - 1 + T, channels], of which the first were seen before -> [T, channels]."""
        total = causal_sum(inputs, self.weight[:, 0].float())
        return (total if self.bias is None else total + self.bias.float()).to(inputs.dtype)


class ConvolutionMixer(RecurrentMixer):
    """A layer with such a convolution: x -> C * convolution(B * V), projected."""

    def __init__(self, shape: ConvolutionShape, layer: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        self.in_proj = Linear(shape.channels, 3 * shape.channels, bias=shape.bias)
        self.conv = CausalConvolution(shape.channels, shape.kernel, shape.bias)
        self.out_proj = Linear(shape.channels, shape.channels, bias=shape.bias)

    def inputs(self) -> tuple[nn.Module, ...]:
        """Return the linear that reads x."""
        return (self.in_proj,)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the state of this layer moves on by the tokens that are not drafted."""
        state, drafted = step.cache.state(self.layer), step.cache.drafted(self.layer)
        before, after, value = self.in_proj(x).chunk(3, -1)
        given = before * value
        inputs = torch.cat((state.columns.T, given))
        seen = len(x) if drafted is None else 1
        if drafted is not None:
            drafted.inputs[: len(x) - 1] = given[1:]
        state.columns.copy_(inputs[seen : seen + self.shape.kernel - 1].T)
        projected: Tensor = self.out_proj(after * self.conv(inputs))
        return projected

    def replay(self, drafted: DraftedInputs, count: int, state: LayerState) -> None:
        """Move `state` on by the first `count` drafted tokens."""
        state.columns.copy_(torch.cat((state.columns.T, drafted.inputs[:count]))[count:].T)
