"""The KV cache: static buffers, one pair per layer, in the type of the model. Knows neither tokens nor text.

Slot s holds position s. Nothing is ever removed: a shorter conversation overwrites, and the attention masks hide the
slots behind the current position. Buffers start as zeros because a masked slot still enters the product with weight
0, and 0 times an uninitialised NaN is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """k and v [kv_heads, capacity, head_dim] per layer; implements `models.layers.Cache`."""

    def __init__(
        self,
        layout: list[tuple[int, int]],
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`layout`: (kv_heads, head_dim) of every layer, as `Decoder.kv_layout()` gives it. Allocates everything."""
        self.capacity = capacity
        self.keys = [torch.zeros(heads, capacity, width, dtype=dtype, device=device) for heads, width in layout]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def update(self, layer: int, k: Tensor, v: Tensor, positions: Tensor, live: int) -> tuple[Tensor, Tensor]:
        """Stores k, v [T, kv_heads, head_dim] at `positions` int64 [T]; returns both as [kv_heads, live, head_dim].

        The results are views. No host synchronisation: works under CUDA graph capture.
        """
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(1, positions, k.transpose(0, 1))
        values.index_copy_(1, positions, v.transpose(0, 1))
        return keys[:, :live], values[:, :live]

    def clear(self) -> None:
        """Zeros every slot: needed after a reply ended in non-finite values, which masking would not hide."""
        for buffer in (*self.keys, *self.values):
            buffer.zero_()

    def bytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    @staticmethod
    def bytes_for(layout: list[tuple[int, int]], capacity: int, dtype: torch.dtype) -> int:
        """Bytes that a cache of this shape allocates."""
        return sum(2 * heads * width for heads, width in layout) * capacity * dtype.itemsize
