"""The KV cache: static buffers, one pair per layer, in the type of the model or in 8 or 4 bit. Knows no tokens.

Slot s holds position s. Nothing is ever removed: a shorter conversation overwrites, and the attention masks hide the
slots behind the current position. Buffers start as zeros because a masked slot still enters the product with weight
0, and 0 times an uninitialised NaN is NaN.

A quantized cache (defined by `engine/kv_codec.py`) gives passes of many tokens a dequantized copy of one layer at a
time, in a scratch buffer shared by all layers. Decode kernels read the codes themselves (`layer`).
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from localq import kv_bits
from localq.engine import kv_codec
from localq.engine.arena import Arena, arena_bytes
from localq.errors import usage_error
from localq.kernels import attention
from localq.kernels.attention import KVLayer
from localq.kernels.checks import HALF_TYPES
from localq.kv_bits import KV_BITS, KvBits

Layout = list[tuple[int, int]]  # (kv_heads, head_dim) of every layer
Shape = tuple[tuple[int, ...], torch.dtype]


class KVCache:
    """One `KVLayer` per layer; implements `models.layers.Cache`."""

    def __init__(
        self, layout: Layout, capacity: int, dtype: torch.dtype, device: torch.device | str, bits: KvBits = 16
    ) -> None:
        """Allocate the cache for `layout` (`Decoder.kv_layout`); bits 16 = the dtype of the model.

        Raises LocalqError (exit 2) for heads that 8 and 4 bits do not support.
        """
        self.capacity, self.bits, self.dtype = capacity, bits, dtype
        _check(layout, bits)
        shapes = [_shapes(heads, width, capacity, dtype, bits) for heads, width in layout]
        copies: Shape = ((2, 0 if bits == 16 else _widest(layout) * capacity), dtype)  # k, v of a layer, dequantized
        all_shapes = [copies, *itertools.chain.from_iterable(shapes)]
        sizes = [math.prod(shape) * kind.itemsize for shape, kind in all_shapes]
        arena = Arena(arena_bytes(sizes), device)
        self.layers = [_layer(arena, parts, bits, width) for parts, (_, width) in zip(shapes, layout, strict=True)]
        self._scratch = arena.empty(*copies).zero_()

    @property
    def keys(self) -> list[Tensor]:
        """The stored keys of every layer, plain or as codes."""
        return [layer.k for layer in self.layers]

    @property
    def values(self) -> list[Tensor]:
        """The stored values of every layer, plain or as codes."""
        return [layer.v for layer in self.layers]

    def layer(self, index: int) -> KVLayer:
        """Return the buffers of one layer, for decode attention."""
        return self.layers[index]

    def update(self, layer: int, k: Tensor, v: Tensor, positions: Tensor, live: int) -> tuple[Tensor, Tensor]:
        """Store k, v [T, kv_heads, head_dim] at `positions` int64 [T]; returns both as [kv_heads, live, head_dim].

        The results are views: of the cache, or of the scratch of a quantized one, which the next call overwrites. No
        host synchronization: works under CUDA graph capture.
        """
        stored = self.layers[layer]
        if self.bits == 16:
            stored.k.index_copy_(1, positions, k.transpose(0, 1))
            stored.v.index_copy_(1, positions, v.transpose(0, 1))
            return stored.k[:, :live], stored.v[:, :live]
        keys, values = (
            part[: stored.kv_heads * live * stored.head_dim].view(stored.kv_heads, live, stored.head_dim)
            for part in self._scratch
        )
        if k.is_cuda and k.dtype in HALF_TYPES:
            attention.kv_write(stored, k, v, positions)
            attention.kv_read(stored, keys, values)
        else:
            key_bits, value_bits = kv_bits.split(self.bits)
            _store(stored.k, stored.k_scales, k, positions, key_bits)
            _store(stored.v, stored.v_scales, v, positions, value_bits)
            keys.copy_(_restore(stored.k, stored.k_scales, live, key_bits, self.dtype))
            values.copy_(_restore(stored.v, stored.v_scales, live, value_bits, self.dtype))
        return keys, values

    def clear(self, first: int = 0) -> None:
        """Zero every slot from `first` on; needed after non-finite values, which masking does not hide."""
        for layer in self.layers:
            for stored in stored_parts(layer):
                stored[:, first:].zero_()
        self._scratch.zero_()

    def bytes(self) -> int:
        """Return the bytes allocated."""
        return sum(buffer.nbytes for buffer in self._buffers())

    @staticmethod
    def bytes_for(layout: Layout, capacity: int, dtype: torch.dtype, bits: KvBits = 16) -> int:
        """Return the bytes that a cache of this shape allocates, with the scratch of a quantized one."""
        stored: KvBits = 8 * dtype.itemsize if bits == 16 else bits
        scratch = 0 if bits == 16 else 2 * _widest(layout) * dtype.itemsize
        return capacity * (scratch + sum(heads * kv_bits.pair_bytes(width, stored) for heads, width in layout))

    def _buffers(self) -> list[Tensor]:
        return [*(stored for layer in self.layers for stored in stored_parts(layer)), self._scratch]


def stored_parts(layer: KVLayer) -> list[Tensor]:
    """Return the buffers of a layer, each [kv_heads, capacity, ...]: k, v, and for codes the scales of k and of v."""
    return [part for part in (layer.k, layer.v, layer.k_scales, layer.v_scales) if part is not None]


def _check(layout: Layout, bits: KvBits) -> None:
    if bits not in KV_BITS:
        raise usage_error("--kv", f"a KV cache of {bits} bits is not supported", "Use 16, 8, k8v4 or 4.")
    for _, width in layout:
        if bits != 16 and (width % 8 or width > attention.MOST_COLUMNS):
            why = f"the attention heads have {width} columns; a KV cache below 16-bit needs a multiple of 8, up to 256"
            raise usage_error("--kv", why, "Use --kv 16.")


def _shapes(heads: int, width: int, capacity: int, dtype: torch.dtype, bits: KvBits) -> list[Shape]:
    """Return the shapes of k and v, and of their scales where they are codes."""
    plain: Shape = ((heads, capacity, width), dtype)
    if bits == 16:
        return [plain, plain]
    codes: list[Shape] = [((heads, capacity, width * part // 8), torch.uint8) for part in kv_bits.split(bits)]
    scales: Shape = ((heads, capacity, kv_bits.scale_count(width)), torch.float16)
    return [*codes, scales, scales]


def _layer(arena: Arena, parts: list[Shape], bits: KvBits, width: int) -> KVLayer:
    k, v, *scales = (arena.empty(shape, dtype).zero_() for shape, dtype in parts)
    k_scales, v_scales = scales or (None, None)
    return KVLayer(k, v, k_scales, v_scales, bits, width)


def _widest(layout: Layout) -> int:
    return max(heads * width for heads, width in layout)


def _store(codes: Tensor, scales: Tensor | None, dense: Tensor, positions: Tensor, bits: int) -> None:
    assert scales is not None
    new_codes, new_scales = kv_codec.quantize(dense.transpose(0, 1), bits)
    codes.index_copy_(1, positions, new_codes)
    scales.index_copy_(1, positions, new_scales)


def _restore(codes: Tensor, scales: Tensor | None, live: int, bits: int, dtype: torch.dtype) -> Tensor:
    assert scales is not None
    return kv_codec.dequantize(codes[:, :live], scales[:, :live], bits, dtype)
