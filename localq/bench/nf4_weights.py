"""Random NF4 weights for the kernel benchmark: as localq's kernels take them and as bitsandbytes takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from localq.kernels import ops
from localq.quant import nf4
from localq.quant.nf4 import Packed


class Weights:
    """A matrix [out, in] and the operations on it; `packed` is its form in `quant.nf4`."""

    def __init__(self, packed: Packed, offset: float) -> None:
        self.packed = packed
        self.shape, self.nbytes = packed.shape, packed.nbytes
        table = nf4.CODE_MAP.to(packed.codes.device)
        self._arguments = (packed.codes, packed.absmax, packed.nested_absmax, packed.nested_map, offset, table)
        self._offset = offset

    @classmethod
    def random(cls, shape: tuple[int, int], device: torch.device, seed: int) -> Weights:
        """Every code, and scales spread over a factor of four; double-quantized."""
        generator = torch.Generator(device).manual_seed(seed)
        blocks = shape[0] * shape[1] // nf4.BLOCK
        nested_blocks = -(-blocks // nf4.NESTED_BLOCK)
        offset = torch.tensor(0.05)
        packed = Packed(
            codes=torch.randint(256, (shape[0], shape[1] // 2), dtype=torch.uint8, device=device, generator=generator),
            absmax=torch.randint(256, (blocks,), dtype=torch.uint8, device=device, generator=generator),
            nested_absmax=0.01 + 0.02 * torch.rand(nested_blocks, device=device, generator=generator),
            nested_map=nf4.dynamic_map().to(device),
            offset=offset.to(device),
            shape=shape,
            dtype=torch.float16,
        )
        return cls(packed, offset.item())

    def copies(self, count: int) -> list[Weights]:
        """`count` equal matrices at addresses of their own; only the map, 1 KB, is shared."""
        mine = self.packed
        assert mine.nested_absmax is not None  # `random` makes no other
        return [
            Weights(
                Packed(
                    mine.codes.clone(), mine.absmax.clone(), mine.nested_absmax.clone(),
                    mine.nested_map, mine.offset, mine.shape, mine.dtype,
                ),
                self._offset,
            )
            for _ in range(count)
        ]  # fmt: skip

    def gemv(self, x: Tensor) -> Tensor:
        """x [rows <= 8, in] -> [rows, out], by localq's kernel."""
        return ops.nf4_gemv(x, *self._arguments, self.shape[0])

    def dequantize(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """[out, in] in `dtype`, by localq's kernel."""
        return ops.nf4_dequantize(*self._arguments, self.shape, dtype, out=out)

    def for_bitsandbytes(self, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """The codes and their QuantState; bitsandbytes must be installed."""
        from bitsandbytes.functional import QuantState  # a rival that need not be there

        codes, absmax, nested_absmax, nested_map, _, table = self._arguments
        shape, offset = torch.Size(self.shape), self.packed.offset
        nested = QuantState(  # type: ignore[no-untyped-call]  # bitsandbytes' gap, as below
            nested_absmax, code=nested_map, blocksize=nf4.NESTED_BLOCK, dtype=torch.float32
        )
        state = QuantState(absmax, shape, table, nf4.BLOCK, "nf4", dtype, offset, nested)  # type: ignore[no-untyped-call]
        return codes.view(-1, 1), state
