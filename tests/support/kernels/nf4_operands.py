"""Operands for the tests of the NF4 kernels, and the tolerance that their results are held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localq.formats import nf4
from localq.formats.cases import TIMES_NAIVE
from localq.formats.nf4 import Packed
from localq.formats.nf4 import tiles as nf4_tiles
from localq.formats.nf4.kernel import Nf4Operand


@dataclass(frozen=True)
class Operands:
    """A matrix in NF4, row by row: `packed`, and `matrix` as the operations take it, of the same tensors."""

    packed: Packed
    matrix: Nf4Operand

    @property
    def dense(self) -> Tensor:
        """float32 [out, in], by the reference."""
        return nf4.dequantize(self.packed, torch.float32)


def operands(shape: tuple[int, int], nested: bool = True, device: str = "cpu", seed: int = 0) -> Operands:
    """Every code occurs, and every absmax code where there are enough; some scales are 30 times the others."""
    generator = torch.Generator().manual_seed(seed)
    blocks = shape[0] * shape[1] // nf4.BLOCK
    nested_absmax = 0.005 + 0.01 * torch.rand(-(-blocks // nf4.NESTED_BLOCK), generator=generator)
    nested_absmax[::5] *= 30
    packed = Packed(
        codes=torch.randint(256, (shape[0], shape[1] // 2), dtype=torch.uint8, generator=generator),
        absmax=torch.randint(256, (blocks,), dtype=torch.uint8, generator=generator),
        nested_absmax=nested_absmax,
        nested_map=nf4.dynamic_map(),
        offset=torch.tensor(0.02),
        shape=shape,
        dtype=torch.float16,
    )
    if not nested:
        scales = nf4.absmax_f32(packed).flatten().contiguous()
        packed = Packed(packed.codes, scales, None, None, None, shape, torch.float16)
    return operands_of(packed.to(device))


def operands_of(packed: Packed) -> Operands:
    """A matrix that is there already."""
    offset = 0.0 if packed.offset is None else packed.offset.item()
    code_map = nf4.CODE_MAP.to(packed.codes.device)
    tensors = (packed.codes, packed.absmax, packed.nested_absmax, packed.nested_map)
    return Operands(packed, Nf4Operand(*tensors, offset, code_map, *packed.shape))


def in_order(matrix: Nf4Operand, tiled: bool) -> Nf4Operand:
    """A row-wise matrix as it is, or the same weights tiled."""
    if not tiled:
        return matrix
    codes, absmax = nf4_tiles.tile(matrix.codes, matrix.absmax, (matrix.out_features, matrix.in_features))
    return replace(matrix, codes=codes, absmax=absmax, tiled=True)


def inputs(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu", seed: int = 1) -> Tensor:
    """x [rows, columns], normal, with a few columns that are 50 times the others, as in real models."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x[:, 5::97] *= 50
    return x.to(dtype).to(device)


def assert_as_good_as_naive(
    got: Tensor, x: Tensor, dense: Tensor, bias: Tensor | None = None, beyond: Callable[[], float] = lambda: 0.0
) -> None:
    """`got` may be twice as far from fp64 as F.linear in the type of x is. dense f32 [out, in], bias of any float type.

    beyond   asked where it is farther: what a rounding that F.linear does not have may add to its error
    """
    exact = x.double() @ dense.double().T
    if bias is not None:
        exact += bias.double()
    naive = torch.nn.functional.linear(x, dense.to(x.dtype), None if bias is None else bias.to(x.dtype))
    naive_error = (naive.double() - exact).abs().max().item()
    error = (got.double() - exact).abs().max().item()
    allowed = TIMES_NAIVE * naive_error + 1e-6 * exact.abs().max().item()
    if error > allowed:
        allowed = max(allowed, naive_error + beyond())
    assert error <= allowed, f"off by {error:.3g}, naive {naive_error:.3g}, allowed {allowed:.3g}"


def bits(tensor: Tensor) -> Tensor:
    """The bits of a float tensor as integers: tells -0 from 0, and a NaN equals itself."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
