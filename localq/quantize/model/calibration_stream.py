"""The calibration text on its way through the layers, in two streams: of the full model and of the quantized one.

Both residual streams wait in host memory between layers; one sequence at a time is on the device. Within a layer every
pass starts from the layer's input again, so that nothing wider than the stream is stored: attention is computed twice,
gate and up as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from localq.errors import ExitCode, LocalqError, bad_file
from localq.files.layer_caches import LayerCache, RecurrentState
from localq.models.attention import Attention, Pass
from localq.models.decoder import Block, Decoder
from localq.models.layers import LayerState, RecurrentMixer, empty_state
from localq.models.unstacked_experts import UnstackedSharedMixture

SLAB_BYTES = 2**29
HOST_BYTES = 8 * 2**30  # of both streams; longer texts are stored in 16 bits


def stream_dtype(windows: int, tokens: int, hidden: int) -> torch.dtype:
    """Return the dtype in which the streams of a text wait on the host."""
    return torch.float32 if 8 * windows * tokens * hidden <= HOST_BYTES else torch.bfloat16


class NoCache:
    """A `layers.Cache` for passes that see only their own tokens."""

    def __init__(self, layout: Sequence[LayerCache] = (), device: torch.device | str = "cpu") -> None:
        """Take the layout of the model (`Decoder.cache_layout`) where it has recurrent layers."""
        self._layout, self._device = layout, device

    def update(self, layer: int, k: Tensor, v: Tensor, positions: Tensor, live: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of this pass."""
        return k.transpose(0, 1), v.transpose(0, 1)

    def update_latents(self, layer: int, latents: Tensor, positions: Tensor, live: int) -> Tensor:
        """Layers that cache latents are not quantized on a text."""
        raise NotImplementedError

    def read(self, layer: int, live: int) -> tuple[Tensor, Tensor]:
        """Layers that share keys and values are not quantized on a text (`source.SourceModel`)."""
        raise NotImplementedError

    def view(self, window: int, live: int) -> tuple[int, int]:
        """Return 0 and `live`: slot s is position s."""
        return 0, live

    def state(self, layer: int) -> LayerState:
        """Return the state at the start of a text, in f32."""
        kept = self._layout[layer]
        assert isinstance(kept, RecurrentState)
        return empty_state(kept, torch.float32, self._device)

    def drafted(self, layer: int) -> None:
        """Return None: no token is drafted."""


class Streams:
    """The quantized stream `x` and the `full` one: per sequence [T, hidden], on the host; layers run on `device`."""

    def __init__(self, model: Decoder, embedded: list[Tensor], device: torch.device) -> None:
        """Take a model with tables on `device`, and the inputs of its first layer, by sequence."""
        self.device = device
        self.x, self.full = _on_host(embedded, device), _on_host(embedded, device)
        tokens = embedded[0].shape[0]
        cache = NoCache(model.cache_layout(), device)
        self.step: Pass = model.begin(torch.arange(tokens, device=device), cache, tokens)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield both streams of every sequence, f32 on the device."""
        for x, full in zip(self.x, self.full, strict=True):
            yield x.to(self.device).float(), full.to(self.device).float()  # converted on the device, not on the host

    def advance(self, made: Callable[[Tensor], Tensor] | None, full: Callable[[Tensor], Tensor]) -> None:
        """Replace both streams of every sequence by the results of the two functions; without the first only `full`."""
        for index, (x, reference) in enumerate(self.pairs()):
            kept, other = self.x[index], self.full[index]
            if made is not None:
                kept.copy_(made(x).to(kept.dtype))
            other.copy_(full(reference).to(other.dtype))

    def check(self, layer: int, name: str, dtype: torch.dtype) -> None:
        """Check that `dtype`, in which the model `name` computes, can hold the output of a layer.

        Raises LocalqError: exit 8 for NaN, 2 for values outside its range.
        """
        check_range(self.x, layer, name, dtype)

    def drift(self) -> float:
        """Return the squared distance of the two streams, as a fraction of the full one's energy."""
        apart = sum(float((x.float() - full.float()).square().sum()) for x, full in zip(self.x, self.full, strict=True))
        return apart / max(sum(float(full.float().square().sum()) for full in self.full), 1e-30)


def check_range(rows: list[Tensor], layer: int, name: str, dtype: torch.dtype) -> None:
    """Check the outputs `rows` of a layer, as `Streams.check` does."""
    largest = float(torch.stack([x.abs().max().float() for x in rows]).max())
    if math.isnan(largest):
        raise bad_file(name, f"layer {layer} produces NaN", "Check the weights with `localq verify`.")
    if not largest <= torch.finfo(dtype).max:
        stated = str(dtype).removeprefix("torch.")
        why = f"layer {layer} produces values as large as {largest:.0f}, outside the range of {stated}"
        raise LocalqError(name, why, "Use --format vq2.", ExitCode.USAGE)


def _on_host(rows: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy to the host; for a GPU into pinned slabs of several rows, because torch pins powers of two."""
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
    """Return the input of the attention projections."""
    return _norm(block.norms().before_attention, x)


def output_projection_input(block: Block, x: Tensor, step: Pass) -> Tensor:
    """Return the input of the output projection."""
    mixer = block.mixer()
    assert isinstance(mixer, Attention | RecurrentMixer)
    with _without(mixer, mixer.output):
        found: Tensor = mixer(attention_input(block, x), step)
    return found


def after_attention(block: Block, x: Tensor, step: Pass) -> Tensor:
    """Return the stream after attention."""
    return x + _norm(block.norms().after_attention, block.mixer()(attention_input(block, x), step))


def mlp_input(block: Block, x: Tensor) -> Tensor:
    """Return the input of gate and up; x: the stream after attention."""
    return _norm(block.norms().before_mlp, x)


def down_projection_input(block: Block, x: Tensor) -> Tensor:
    """Return the input of the down projection; x: the stream after attention."""
    with _without(block.mlp, "down_proj"):
        found: Tensor = block.mlp(mlp_input(block, x))
    return found


def shared_projection_input(block: Block, x: Tensor) -> Tensor:
    """Return the input of the down projection of a shared expert; x: the stream after attention."""
    mixture: nn.Module = block.mlp
    assert isinstance(mixture, UnstackedSharedMixture)
    with _without(mixture.shared_expert, "down_proj"):
        found: Tensor = mixture.shared_expert(mlp_input(block, x))
    return found


def after_mlp(block: Block, x: Tensor) -> Tensor:
    """Return the stream after the block; x: the stream after attention."""
    return block.block_output(x + _norm(block.norms().after_mlp, block.mlp(mlp_input(block, x))))


def _norm(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


@contextmanager
def _without(owner: nn.Module, name: str) -> Iterator[None]:
    """Replace a linear of `owner` by the identity."""
    linear = getattr(owner, name)
    setattr(owner, name, nn.Identity())
    try:
        yield
    finally:
        setattr(owner, name, linear)
