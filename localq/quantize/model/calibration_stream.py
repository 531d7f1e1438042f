"""The calibration text on its way through the model, layer by layer: as the full model has it, and the quantized one.

Both residual streams wait in host memory between layers; a sequence at a time is on the device. Within a layer every
sweep begins where the last finished one ended, so that nothing wider than the stream is kept: attention is computed
twice, gate and up as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from localq.errors import ExitCode, LocalqError, bad_file
from localq.models.attention import Pass
from localq.models.decoder import Block, Decoder

SLAB_BYTES = 2**29
HOST_BYTES = 8 * 2**30  # of both streams; longer texts are kept in 16 bits


def stream_dtype(windows: int, tokens: int, hidden: int) -> torch.dtype:
    """In which the streams of a text wait on the host."""
    return torch.float32 if 8 * windows * tokens * hidden <= HOST_BYTES else torch.bfloat16


class NoCache:
    """`layers.Cache` of a pass that sees its own tokens only."""

    def update(self, layer: int, k: Tensor, v: Tensor, positions: Tensor, live: int) -> tuple[Tensor, Tensor]:
        """See `layers.Cache`."""
        return k.transpose(0, 1), v.transpose(0, 1)


class Streams:
    """x and full: per sequence [T, hidden], on the host; `device` is where layers run."""

    def __init__(self, model: Decoder, embedded: list[Tensor], device: torch.device) -> None:
        """model: its tables are on `device`. embedded: what the first layer reads, in the order of the sequences."""
        self.device = device
        self.x, self.full = _on_host(embedded, device), _on_host(embedded, device)
        tokens = embedded[0].shape[0]
        self.step: Pass = model.begin(torch.arange(tokens, device=device), NoCache(), tokens)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Both streams of every sequence, f32 on the device."""
        for x, full in zip(self.x, self.full, strict=True):
            yield x.to(self.device).float(), full.to(self.device).float()  # torch would widen it on the host

    def advance(self, made: Callable[[Tensor], Tensor] | None, full: Callable[[Tensor], Tensor]) -> None:
        """Replace every sequence by what the two functions make of it; without the first, of the full one alone."""
        for index, (x, reference) in enumerate(self.pairs()):
            kept, other = self.x[index], self.full[index]
            if made is not None:
                kept.copy_(made(x).to(kept.dtype))
            other.copy_(full(reference).to(other.dtype))

    def check(self, layer: int, name: str, dtype: torch.dtype) -> None:
        """Can `dtype`, in which the model `name` is to compute, hold what comes out of a layer?

        Raises LocalqError: exit 8 for values that are no numbers, 2 for values beyond it.
        """
        check_range(self.x, layer, name, dtype)

    def drift(self) -> float:
        """How far the quantized stream is from the full one, in parts of the full one's energy."""
        apart = sum(float((x.float() - full.float()).square().sum()) for x, full in zip(self.x, self.full, strict=True))
        return apart / max(sum(float(full.float().square().sum()) for full in self.full), 1e-30)


def check_range(rows: list[Tensor], layer: int, name: str, dtype: torch.dtype) -> None:
    """See `Streams.check`; rows: what comes out of the layer."""
    largest = float(torch.stack([x.abs().max().float() for x in rows]).max())
    if math.isnan(largest):
        raise bad_file(name, f"layer {layer} makes values that are no numbers", "Fetch the model again.")
    if not largest <= torch.finfo(dtype).max:
        stated = str(dtype).removeprefix("torch.")
        why = f"layer {layer} makes values up to {largest:.0f}, beyond {stated}, in which it would compute"
        raise LocalqError(name, why, "Use --format vq2.", ExitCode.USAGE)


def _on_host(rows: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copies; for a GPU in memory that it reads by itself, a few to a slab: torch takes powers of two of it."""
    if device.type != "cuda":
        return [each.clone() for each in rows]
    count, found = max(1, SLAB_BYTES // rows[0].nbytes), []
    for begin in range(0, len(rows), count):
        some = rows[begin : begin + count]
        slab = torch.empty(len(some), *some[0].shape, dtype=some[0].dtype, pin_memory=True)
        for place, each in zip(slab, some, strict=True):
            place.copy_(each)
        found += list(slab)
    return found


# ---- parts of a block, whatever its family


def attention_input(block: Block, x: Tensor) -> Tensor:
    """What the projections of attention read."""
    normed: Tensor = block.norms().before_attention(x)
    return normed


def output_projection_input(block: Block, x: Tensor, step: Pass) -> Tensor:
    """What the output projection reads."""
    with _without(block.self_attn, "o_proj"):
        found: Tensor = block.self_attn(attention_input(block, x), step)
    return found


def after_attention(block: Block, x: Tensor, step: Pass) -> Tensor:
    """The stream behind attention."""
    return x + _normed(block.norms().after_attention, block.self_attn(attention_input(block, x), step))


def mlp_input(block: Block, x: Tensor) -> Tensor:
    """What gate and up read; x as `after_attention` left it."""
    normed: Tensor = block.norms().before_mlp(x)
    return normed


def down_projection_input(block: Block, x: Tensor) -> Tensor:
    """What the down projection reads."""
    with _without(block.mlp, "down_proj"):
        found: Tensor = block.mlp(mlp_input(block, x))
    return found


def after_mlp(block: Block, x: Tensor) -> Tensor:
    """The stream behind the block."""
    return x + _normed(block.norms().after_mlp, block.mlp(mlp_input(block, x)))


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


@contextmanager
def _without(owner: nn.Module, name: str) -> Iterator[None]:
    """`owner` with nothing in the place of its last linear."""
    linear = getattr(owner, name)
    setattr(owner, name, nn.Identity())
    try:
        yield
    finally:
        setattr(owner, name, linear)
