"""Launches of recurrent layers in a decode step: gated delta nets or short convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from localq.engine.step.fused_convolution import ConvolutionLaunches
from localq.engine.step.fused_delta import DeltaLaunches
from localq.engine.step.launch import Launch
from localq.engine.step.rows import StepBuffers
from localq.kernels.gemv import Norm
from localq.models.decoder import Block, Decoder
from localq.models.gated_delta_net import GatedDeltaNet
from localq.models.layers import DraftedInputs, LayerState
from localq.models.short_convolution import ConvolutionMixer

RecurrentLaunches = DeltaLaunches | ConvolutionLaunches


def mixers(model: Decoder) -> list[nn.Module]:
    """The token mixer of every layer."""
    return [block.mixer() for block in model.layers if isinstance(block, Block)]


def recurrent_launches(
    model: Decoder, dtype: torch.dtype, position: Tensor, buffers: StepBuffers, rows: int, replays: bool
) -> RecurrentLaunches | None:
    """The launches of the recurrent layers, which are of one kind in a model; None where there are none."""
    for mixer in mixers(model):
        if isinstance(mixer, GatedDeltaNet):
            return DeltaLaunches(mixer.shape, dtype, position, buffers, rows, replays)
        if isinstance(mixer, ConvolutionMixer):
            return ConvolutionLaunches(mixer.shape, dtype, position, buffers, rows, replays)
    return None


def layer_launches(
    launches: RecurrentLaunches, mixer: nn.Module, x: Tensor, norm: Norm, state: LayerState, drafted: DraftedInputs
) -> list[Launch]:
    """launches.out = what `mixer` makes of norm(x), before its way out; `state` moves on."""
    if isinstance(launches, DeltaLaunches):
        assert isinstance(mixer, GatedDeltaNet)
        return launches.of(mixer, x, norm, state, drafted)
    assert isinstance(mixer, ConvolutionMixer)
    return launches.of(mixer, x, norm, state, drafted)
