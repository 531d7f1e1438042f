"""Random NF4 weights for the benchmarks: as localq's kernels take them, in both orders, and as bitsandbytes does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from localq.formats import nf4
from localq.formats.nf4 import Packed
from localq.formats.nf4 import tiles as nf4_tiles
from localq.formats.nf4.kernel import Nf4Operand

OFFSET = 0.05


@dataclass(frozen=True)
class Weights:
    """A matrix [out, in]: `packed` is its form in `quant.nf4`, `matrix` what the kernels take (row by row)."""

    packed: Packed
    matrix: Nf4Operand

    @classmethod
    def random(cls, shape: tuple[int, int], device: torch.device, seed: int) -> Weights:
        """Every code, and scales spread over a factor of four; double-quantized."""
        generator = torch.Generator(device).manual_seed(seed)
        blocks = shape[0] * shape[1] // nf4.BLOCK
        nested_blocks = -(-blocks // nf4.NESTED_BLOCK)
        codes = torch.randint(256, (shape[0], shape[1] // 2), dtype=torch.uint8, device=device, generator=generator)
        absmax = torch.randint(256, (blocks,), dtype=torch.uint8, device=device, generator=generator)
        nested_absmax = 0.01 + 0.02 * torch.rand(nested_blocks, device=device, generator=generator)
        nested_map, offset = nf4.dynamic_map().to(device), torch.tensor(OFFSET, device=device)
        packed = Packed(codes, absmax, nested_absmax, nested_map, offset, shape, torch.float16)
        code_map = nf4.CODE_MAP.to(device)
        # The kernels add the offset as the f32 that it is, not as the double that was written down.
        matrix = Nf4Operand(codes, absmax, nested_absmax, nested_map, offset.item(), code_map, *shape)
        return cls(packed, matrix)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors but the two small tables."""
        nested = self.matrix.nested_absmax
        return self.matrix.codes.nbytes + self.matrix.absmax.nbytes + (0 if nested is None else nested.nbytes)

    def with_tables_of(self, other: Weights) -> Weights:
        """The same weights, the two small tables at `other`'s addresses: one launch takes one of each."""
        tables = other.matrix
        return replace(self, matrix=replace(self.matrix, code_map=tables.code_map, nested_map=tables.nested_map))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in], by the reference."""
        return nf4.dequantize(self.packed, dtype)

    def tiled(self) -> Nf4Operand:
        """The same weights in the order in which the kernels read them."""
        codes, absmax = nf4_tiles.tile(self.matrix.codes, self.matrix.absmax, self.packed.shape)
        return replace(self.matrix, codes=codes, absmax=absmax, tiled=True)


def copies(matrix: Nf4Operand, count: int) -> list[Nf4Operand]:
    """`matrix` and `count` - 1 equal ones at addresses of their own; only the two small tables are shared."""
    nested = matrix.nested_absmax
    return [
        matrix,
        *(
            replace(
                matrix,
                codes=matrix.codes.clone(),
                absmax=matrix.absmax.clone(),
                nested_absmax=None if nested is None else nested.clone(),
            )
            for _ in range(count - 1)
        ),
    ]


def for_bitsandbytes(matrix: Nf4Operand, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """The codes of a row-by-row matrix and their QuantState; bitsandbytes must be installed."""
    from bitsandbytes.functional import QuantState  # a rival that need not be there

    shape = torch.Size((matrix.out_features, matrix.in_features))
    offset = torch.tensor(matrix.offset, dtype=torch.float32, device=matrix.codes.device)
    nested = QuantState(  # type: ignore[no-untyped-call]  # bitsandbytes' gap, as below
        matrix.nested_absmax, code=matrix.nested_map, blocksize=nf4.NESTED_BLOCK, dtype=torch.float32
    )
    state = QuantState(matrix.absmax, shape, matrix.code_map, nf4.BLOCK, "nf4", dtype, offset, nested)  # type: ignore[no-untyped-call]
    return matrix.codes.view(-1, 1), state
