"""The self-test of the kernels of matrices: every operation of `formats.cases` on its quick cases, against the format.

Products against fp64 with the weights that the definition gives, plain weights bit for bit. What a format has besides
its matrices (rows in groups, rotations, every scale of MXFP4) is a check of its own below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from localq.engine.selftest.compare import HALF, near_gated, near_product, normal, same
from localq.formats import FORMATS, int8, mxfp4
from localq.formats.cases import BY_OP, KERNELS, Case, Kernel
from localq.formats.codebooks import aqlm, gather_kernel, lookup_kernel, rotation, vq2
from localq.formats.linear import PackedLinear, SlabLinear
from localq.formats.nf4 import kernel as nf4_kernel
from localq.kernels.gemv import Norm
from localq.kernels.operand import Operand, share_tables

MODULES: dict[str, ModuleType] = {**FORMATS, "int8": int8}
FIRST = 32  # a second row to dequantize from: whole tiles, whole vectors
TURNED_COLUMNS = (48, 1536, 8192)  # blocks of one warp, and of several


def linear_of(
    case: Case, device: torch.device, seed: int, tiled: bool, dtype: torch.dtype = HALF
) -> tuple[PackedLinear, Any]:
    """A random matrix on the device, in tiles or as stored, and its tensors on the CPU; 16-bit ones in `dtype`."""
    module = MODULES[case.format]
    packed = module.sample(case.shape, seed, "cpu", case.scheme)
    if dtype != HALF:
        tensors = {each.name: getattr(packed, each.name) for each in fields(packed)}
        packed = replace(packed, **{name: value.to(dtype) for name, value in tensors.items()
                                    if isinstance(value, Tensor) and value.dtype == HALF})  # fmt: skip
    held = copy.deepcopy(packed).to(device) if hasattr(packed, "to") else packed
    linear: PackedLinear = module.Linear(held).to(device)
    return linear.put_into_tiles() if tiled and isinstance(linear, SlabLinear) else linear, packed


def multiplied(case: Case, packed: Any) -> Tensor:
    """f32 [out, in]: the weights as products of the format take them."""
    module = MODULES[case.format]
    weight: Tensor = (
        module.multiplied(packed) if hasattr(module, "multiplied") else module.dequantize(packed, torch.float32)
    )
    return weight


def operand_of(linear: PackedLinear) -> Operand:
    """Of a layout that a kernel reads."""
    operand = linear.operand()
    assert operand is not None
    return operand


def check_product(kernel: Kernel, device: torch.device) -> None:
    """All numbers of rows in all types; of one row in 16 bit a residual, and a gated pair behind a norm."""
    for case, tiled in product(kernel.quick, kernel.orders):
        held: dict[torch.dtype, tuple[list[Operand], Tensor, Tensor]] = {}  # tensors of most formats are of one type
        for dtype in kernel.dtypes:
            stored = dtype if kernel.typed else HALF
            if stored not in held:
                pair = [linear_of(case, device, seed, tiled, stored) for seed in (1, 5)]
                weight, up = (multiplied(case, packed) for _, packed in pair)
                held[stored] = share_tables([operand_of(linear) for linear, _ in pair]), weight, up
            operands, weight, up = held[stored]
            wide = normal(max(kernel.rows), case.shape[1], seed=11).to(dtype)  # unlike every matrix's seed
            for rows in kernel.rows:
                out = torch.full((rows, case.shape[0]), torch.nan, device=device)
                near_product(operands[0].launch(wide[:rows].to(device), operands[:1], out=out), wide[:rows], weight)
            if dtype == HALF:
                near_residual(operands[0], wide[:1], weight, device)
                near_gated(partial(_gated, operands), wide, weight, up, device)


def _gated(operands: list[Operand], norm: Norm, x: Tensor) -> Tensor:
    result: Tensor = operands[0].launch(x, operands, norm=norm, activation="silu")
    return result


def near_residual(operand: Operand, x: Tensor, weight: Tensor, device: torch.device) -> None:
    """residual + x W^T, rounded to the type of x."""
    residual = normal(1, weight.shape[0], seed=2).to(HALF)
    near_product(operand.launch(x.to(device), [operand], residual=residual.to(device)), x, weight, residual)


def check_weights(kernel: Kernel, device: torch.device) -> None:
    """To each type, whole and from a row in the middle on, bit for bit."""
    for case in kernel.quick:
        for tiled in kernel.orders:
            linear, packed = linear_of(case, device, 1, tiled)
            assert isinstance(linear, SlabLinear)
            for dtype in kernel.dtypes:
                expected = MODULES[case.format].dequantize(packed, dtype)
                for first in (0, FIRST):
                    out = torch.full(expected[first:].shape, torch.nan, dtype=dtype, device=device)
                    same(linear.unpack(first, out), expected[first:])


def check_many_rows(kernel: Kernel, device: torch.device) -> None:
    """`nf4_gemm`: rows that fill no tile."""
    for case in kernel.quick:
        for tiled in kernel.orders:
            linear, packed = linear_of(case, device, 1, tiled)
            operand = operand_of(linear)
            assert isinstance(operand, nf4_kernel.Nf4Operand)
            for rows in kernel.rows:
                x = normal(rows, case.shape[1]).to(HALF)
                near_product(nf4_kernel.nf4_gemm(x.to(device), operand), x, multiplied(case, packed))


# ---- what one format has


def _rows_in_groups(device: torch.device) -> None:
    """AQLM whose codewords reach over two rows."""
    plain = aqlm.sample((41, 288), 1, "cpu", "3x4g16")
    packed = replace(plain, codebooks=plain.codebooks.view(3, 16, 2, 8))
    linear = aqlm.Linear(packed.to(device))
    for dtype in BY_OP["additive_dequantize"].dtypes:
        out = torch.full(packed.shape, torch.nan, dtype=dtype, device=device)
        same(linear.unpack(0, out), aqlm.dequantize(packed, dtype))


def _rotated(device: torch.device) -> None:
    """vq2 whose product rotates x."""
    for columns in TURNED_COLUMNS:
        packed, x = vq2.sample((83, columns), 1), normal(1, columns).to(HALF)
        signs = rotation.packed_signs(normal(columns, seed=2) < 0)
        weight = vq2.dequantize(packed, torch.float32)
        tiles = vq2.Linear(packed.to(device)).put_into_tiles().operand()
        assert isinstance(tiles, lookup_kernel.VqOperand)
        got = lookup_kernel.vq_gemv(x.to(device), [replace(tiles, signs=signs.to(device))])
        near_product(got, rotation.rotate(x, signs), weight)


def _every_scale(device: torch.device) -> None:
    """MXFP4 with every scale that is a number."""
    packed = mxfp4.sample((83, 704), 1)
    packed.scales.view(-1)[:] = torch.arange(packed.scales.numel()).fmod(255).to(torch.uint8)
    linear = mxfp4.Linear(packed.to(device))
    for dtype in BY_OP["mxfp4_dequantize"].dtypes:
        out = torch.full(packed.shape, torch.nan, dtype=dtype, device=device)
        same(linear.unpack(0, out), mxfp4.dequantize(packed, dtype))


def check_gather_roof(device: torch.device) -> None:
    """An even number of equal words cancels out in every sum."""
    table = torch.full((2**14,), 0x5A, dtype=torch.uint8, device=device)
    sums = torch.full((512,), -1, dtype=torch.int32, device=device)
    for step in gather_kernel.ROOF_STEPS:
        same(gather_kernel.gather_roof(table, step, 32, sums), torch.zeros(512, dtype=torch.int32))


BESIDES = {"additive_dequantize": _rows_in_groups, "vq_gemv": _rotated, "mxfp4_dequantize": _every_scale}


def _check(kernel: Kernel, device: torch.device) -> None:
    if not kernel.rows:
        check_weights(kernel, device)
    elif min(kernel.rows) > 1:
        check_many_rows(kernel, device)
    else:
        check_product(kernel, device)
    if kernel.op in BESIDES:
        BESIDES[kernel.op](device)


CHECKS: dict[str, Callable[[torch.device], None]] = {kernel.op: partial(_check, kernel) for kernel in KERNELS}
