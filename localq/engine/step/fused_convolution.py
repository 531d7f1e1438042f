"""The launches of short convolutions in a decode step, between their two products: by torch, in place.

    qkv     x -> norm -> B, C and V behind each other
    conv    B * V, its sum with those of the tokens before, times C; the state moves on by the token
    o       + residual (`fused.py`)

Sums are in f32, in the order of `models.recurrent.causal_sum`. Of drafts as in `fused_delta`: a step with drafts
first moves the state on by the accepted tokens of the drafts before.

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
from localq.kernels.gemv import Norm
from localq.models.layers import DraftedInputs, LayerState
from localq.models.short_convolution import ConvolutionMixer, ConvolutionShape

NOWHERE = 2**62  # position of the first drafted token where there is none


class ConvolutionLaunches:
    """Buffers shared by the short convolutions of all layers in a step of `rows` rows, and their launches.

    out   T [rows, channels], what the way out reads
    """

    def __init__(
        self,
        shape: ConvolutionShape,
        dtype: torch.dtype,
        position: Tensor,
        buffers: StepBuffers,
        rows: int = 1,
        replays: bool = False,
    ) -> None:
        """position i64 [1]: of the first row. replays: a step of one row replays drafted tokens, too."""
        width, device, past = shape.channels, position.device, shape.kernel - 1
        self._shape, self._position, self._buffers, self._rows = shape, position, buffers, rows
        self._is_plain = rows == 1 and not replays
        self._inputs = buffers.take("convolution_inputs", rows, 3 * width, dtype, device)
        self._given = buffers.take("convolution_given", rows, width, dtype, device)
        self._sum = buffers.take("convolution_sum", rows, width, torch.float32, device)
        self.out = buffers.take("convolution_out", rows, width, dtype, device)
        # What the state has seen, and behind it drafted tokens or those of the step.
        self._seen = buffers.shared("convolution_seen", (past + buffers.most, width), torch.float32, device)
        self._first = buffers.shared("convolution_first", (1,), torch.int64, device)
        self._places = buffers.shared("convolution_places", (past,), torch.int64, device)
        self._offsets = buffers.shared("convolution_offsets", (past,), torch.int64, device)
        torch.arange(past, out=self._offsets)
        self._replays: list[Callable[[Tensor], None]] = []

    def of(
        self, part: ConvolutionMixer, x: Tensor, norm: Norm, state: LayerState, drafted: DraftedInputs
    ) -> list[Launch]:
        """out = C * convolution(B * V) of norm(x) T [rows, hidden]; `state` moves on."""
        products = [known(operand(part.in_proj))]
        if self._rows == 1:
            found = [product_launch("qkv", x, products, self._inputs, norm=norm)]
        else:
            found = row_products("qkv", x, products, self._inputs, self._buffers, norm=norm)
        mix = partial(self._mix, self._taps(part), part.conv.bias, state.columns, drafted.inputs)
        if not self._is_plain:
            replay = partial(self._replay, state.columns, drafted.inputs)
            self._replays.append(replay)
            found.append(Launch("conv", lambda: replay(self._position), lambda live: 2 * self._seen.nbytes))
        moved = self._inputs.nbytes + self.out.nbytes + 2 * state.columns.nbytes + self._shape.kernel * self._sum.nbytes
        return [*found, Launch("conv", mix, lambda live: moved)]

    def end(self) -> list[Launch]:
        """Behind the last layer: tell the next launch where the drafted tokens of this step begin."""
        if self._rows == 1:
            return []
        first, position = self._first, self._position
        return [Launch("conv", lambda: torch.add(position, 1, out=first), lambda live: 16)]

    def forget(self) -> None:
        """Let the next step replay nothing."""
        self._first.fill_(NOWHERE)

    def replay(self, count: int) -> None:
        """Move all states on by the first `count` drafted tokens, without a step."""
        for replay in self._replays:
            replay(self._first + count)

    def _mix(self, taps: Tensor, bias: Tensor | None, columns: Tensor, drafted: Tensor) -> None:
        """taps f32 [kernel, channels]; columns of the state T [channels, kernel - 1]; drafted T [rows, channels]."""
        before, after, value = self._inputs.chunk(3, 1)
        given, total, rows, past = self._given, self._sum, self._rows, self._shape.kernel - 1
        torch.mul(before, value, out=given)
        seen = self._seen[: past + rows]
        seen[:past].copy_(columns.T)
        seen[past:].copy_(given)
        columns.T.copy_(seen[1 : past + 1])
        if rows > 1:
            drafted[: rows - 1].copy_(given[1:])
        torch.mul(seen[:rows], taps[0], out=total)
        for tap in range(1, past + 1):
            total.addcmul_(seen[tap : tap + rows], taps[tap])
        if bias is not None:
            total.add_(bias)
        self.out.copy_(total)
        self.out.mul_(after)

    def _replay(self, columns: Tensor, drafted: Tensor, position: Tensor) -> None:
        """Move the state on by the drafted tokens below `position`, i64 [1]: none where there are no drafted ones."""
        past, most = self._shape.kernel - 1, len(drafted)
        seen = self._seen[: past + most]
        seen[:past].copy_(columns.T)
        seen[past:].copy_(drafted)
        torch.sub(position, self._first, out=self._places[:1])
        count = self._places[:1].clamp_(0, most).clone()
        torch.add(self._offsets, count, out=self._places)
        columns.T.copy_(seen.index_select(0, self._places))

    def _taps(self, part: ConvolutionMixer) -> Tensor:
        """The taps of the convolution, f32 [kernel, channels]."""
        shape = (self._shape.kernel, self._shape.channels)
        taps = self._buffers.shared(f"convolution_taps.{part.layer}", shape, torch.float32, self._position.device)
        return taps.copy_(part.conv.weight.detach()[:, 0].T)
