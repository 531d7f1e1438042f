"""Base of recurrent layers: the causal convolution, and drafted tokens, of which only the inputs are kept.

Drafted tokens go one by one from a copy of the state (`look_ahead`), and the accepted ones again from the state itself
(`replay`), with the operations of a pass of one token: the same bits as without drafts from the same inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from localq.models.layers import DraftedInputs, LayerState, RecurrentMixer


class RecurrentLayer(RecurrentMixer):
    """A mixer whose drafted tokens are replayed by what it does with one token."""

    def advance(self, inputs: Tensor, decay: Tensor, beta: Tensor, state: LayerState) -> Tensor:
        """Inputs of the convolution [columns + T, C], decay and beta f32 [T, heads] -> what the heads read [T, ...].

        `state` moves on by T tokens, in place.
        """
        raise NotImplementedError

    def look_ahead(self, given: DraftedInputs, state: LayerState, drafted: DraftedInputs) -> Tensor:
        """As `advance` for the rows of `given`, but `state` moves on by the first token alone.

        The inputs of the others go into `drafted`.
        """
        later = given.inputs.shape[0] - 1
        for kept, part in zip(drafted, given, strict=True):
            kept[:later] = part[1:]
        first = self._one_by_one(given, 1, state)
        ahead = LayerState(state.matrix.clone(), state.columns.clone())
        return torch.cat((*first, *self._one_by_one(drafted, later, ahead)))

    def replay(self, drafted: DraftedInputs, count: int, state: LayerState) -> None:
        """Move `state` on by the first `count` drafted tokens."""
        self._one_by_one(drafted, count, state)

    def _one_by_one(self, given: DraftedInputs, count: int, state: LayerState) -> list[Tensor]:
        """As `advance` for each of the first `count` rows of `given`."""
        found = []
        for row in range(count):
            inputs, decay, beta = (part[row : row + 1] for part in given)
            found.append(self.advance(torch.cat((state.columns.T, inputs)), decay, beta, state))
        return found


class ShortConvolution(nn.Module):
    """A causal convolution of every channel by itself, and silu."""

    def __init__(self, channels: int, kernel: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, inputs: Tensor, channels: slice) -> Tensor:
        """inputs [kernel - 1 + T, C], of which the first were seen before -> [T, the `channels`]."""
        total = causal_sum(inputs[:, channels], self.weight[channels, 0].float())
        if self.bias is not None:
            total += self.bias[channels].float()
        return F.silu(total.to(inputs.dtype))


def causal_sum(inputs: Tensor, taps: Tensor) -> Tensor:
    """inputs [kernel - 1 + T, C], taps f32 [C, kernel], the last of a token itself -> their sums f32 [T, C]."""
    tokens = inputs.shape[0] - taps.shape[1] + 1
    total = inputs[:tokens].float() * taps[:, 0]
    for tap in range(1, taps.shape[1]):
        total.addcmul_(inputs[tap : tap + tokens].float(), taps[:, tap])
    return total
