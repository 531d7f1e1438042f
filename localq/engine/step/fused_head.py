"""Launches of a decode step where an MTP block drafts: what its layer reads, and the hidden states it finds.

The step of the model leaves the result of its last norm in the ring of the block, and so does the step of the block for
the position behind (`models.qwen3_5_mtp`). The block's step begins with the two halves of what `fc` reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localq.engine.step.launch import Launch
from localq.engine.step.operands import known, operand, product_launch
from localq.engine.step.rows import StepBuffers
from localq.engine.step.state import StepState
from localq.kernels import embed, rmsnorm
from localq.kernels.gemv import Norm
from localq.models.decoder import Decoder
from localq.models.layers import RMSNorm
from localq.models.qwen3_5_mtp import MultiTokenPrediction


def joined(block: MultiTokenPrediction, state: StepState, buffers: StepBuffers, out: Tensor) -> list[Launch]:
    """out [1, hidden] = fc of the normed embedding of the token and the normed hidden state of its position."""
    width, dtype, device = out.shape[1], out.dtype, out.device
    both = buffers.take("joined", 1, 2 * width, dtype, device)
    slot = buffers.take("slot", 1, 1, torch.int64, device)
    following, hidden = both[:, :width], both[:, width:]
    table, slots = block.embed_tokens.weight.detach(), len(block.hiddens)

    def select() -> None:
        torch.remainder(state.position, slots, out=slot[0])
        torch.index_select(block.hiddens, 0, slot[0], out=hidden)

    moved = embed.embed_bytes(1, width)
    return [
        Launch("embed", lambda: embed.embed(state.token, table, scale=1.0, out=following), lambda live: moved),
        _norm(block.pre_fc_norm_embedding, following),
        Launch("embed", select, lambda live: 2 * hidden.nbytes),
        _norm(block.pre_fc_norm_hidden, hidden),
        product_launch("embed", both, [known(operand(block.fc))], out),
    ]


def kept(model: Decoder, state: StepState, x: Tensor, normed: Tensor) -> list[Launch]:
    """Leave the normed x [rows, hidden] where a block finds it, if one reads it; normed: a buffer."""
    tap, rows, norm = model.tap, x.shape[0], Norm(model.norm.factor.detach(), model.norm.eps)
    if isinstance(model, MultiTokenPrediction):
        block = model

        def keep() -> None:
            rmsnorm.rmsnorm(x, norm, out=normed)
            block.take(state.position + 1, normed)

    elif tap is not None:

        def keep() -> None:
            state.place_rows(rows)
            rmsnorm.rmsnorm(x, norm, out=normed)
            tap(state.positions[:rows], normed)

    else:
        return []
    moved = rmsnorm.rmsnorm_bytes(rows, x.shape[1], offset=norm.weight.dtype == torch.float32)
    return [Launch("norm", keep, lambda live: moved + 2 * normed.nbytes)]


def _norm(norm: RMSNorm, x: Tensor) -> Launch:
    """In place."""
    factor = Norm(norm.factor.detach(), norm.eps)
    moved = rmsnorm.rmsnorm_bytes(1, x.shape[1], offset=factor.weight.dtype == torch.float32)
    return Launch("norm", lambda: rmsnorm.rmsnorm(x, factor, out=x), lambda live: moved)
