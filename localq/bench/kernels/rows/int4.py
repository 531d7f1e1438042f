"""Rows of the products with 4-bit weights of AWQ and GPTQ, beside cuBLAS with the same weights in 16 bit.

And of their dequantization.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from localq.bench.kernels import products
from localq.bench.kernels.shapes import Product, Workload
from localq.bench.kernels.table import Row
from localq.bench.kernels.timing import SEED, Bench, check, type_name, wrong
from localq.formats.int4 import codec as int4_codec
from localq.formats.int4 import kernel as int4_kernel
from localq.formats.int4 import tiles as int4_tiles
from localq.formats.int4.codec import Packed
from localq.formats.int4.kernel import Int4Operand

HALF = torch.float16
GROUP = 128  # of nearly all published checkpoints
# Rows of x, its type, columns of a group, columns in the order of their groups.
PLAIN_CASES = (
    (1, HALF, GROUP, False), (2, HALF, GROUP, False), (4, HALF, GROUP, False), (8, HALF, GROUP, False),
    (1, torch.bfloat16, GROUP, False), (1, HALF, 64, False), (1, HALF, 32, False), (1, HALF, GROUP, True),
)  # fmt: skip
FUSED_CASES = ((1, HALF, GROUP, False), (1, HALF, GROUP, True))


def cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """What is to be measured; matrices that make no whole tiles, or no whole groups, have no kernel."""
    found: list[Callable[[Bench], Row]] = [
        partial(gemv_row, product=product, rows=rows, dtype=dtype, group=group, ordered=ordered)
        for product in work.nf4
        for rows, dtype, group, ordered in (FUSED_CASES if product.form else PLAIN_CASES)
        if all(_fits(out, product.columns, group) for out in product.outs)
    ]
    wanted = [product for product in work.dequantized if _fits(product.outs[0], product.columns, GROUP)]
    return found + [partial(dequantize_row, product=product) for product in wanted]


def gemv_row(bench: Bench, product: Product, rows: int, dtype: torch.dtype, group: int, ordered: bool) -> Row:
    """One `int4_gemv`, checked and timed."""
    given = products.inputs(bench, product, rows, dtype)
    made = [_packed(bench, out, product.columns, group, ordered, index) for index, out in enumerate(product.outs)]
    matrices = _tiled(made)
    out = torch.empty(rows, product.width, dtype=dtype, device=bench.device)

    def multiply(of: Sequence[Int4Operand]) -> Tensor:
        return int4_kernel.int4_gemv(
            given.x, of, norm=given.norm, residual=given.residual, activation=given.activation, out=out
        )

    what = f"{products.describe(product)}, g{group}{', ordered' if ordered else ''}"
    # Held against weights that are not rounded to 16 bit, as the kernel multiplies them.
    wide = [int4_codec.dequantize(replace(each, scales=each.scales.float()), torch.float32) for each in made]
    dense = [int4_codec.dequantize(each, HALF).to(dtype) for each in made]
    check("int4_gemv", what, multiply(matrices), products.exact(given, wide), products.naive(given, dense))
    del wide
    stored = sum(int4_kernel.int4_weight_bytes(each.out_features, product.columns, group) for each in matrices)
    copies = [_copied(matrices) for _ in range(bench.copies(stored))]
    timing = bench.time([partial(multiply, each) for each in copies])
    rivals = (products.cublas(bench, given.x, dense),)
    moved = given.nbytes + stored + out.nbytes + (2 * product.columns if ordered else 0)
    return Row("int4", "int4_gemv", what, rows, type_name(dtype), moved, timing, rivals)


def dequantize_row(bench: Bench, product: Product) -> Row:
    """One `int4_dequantize` of a whole matrix to f16, checked bit by bit and timed."""
    out, columns = product.outs[0], product.columns
    packed = _packed(bench, out, columns, GROUP, False, 0)
    reference, (matrix,) = int4_codec.dequantize(packed, HALF), _tiled([packed])
    what = f"{product.name}, g{GROUP}"
    if not torch.equal(int4_kernel.int4_dequantize(matrix, 0, torch.empty_like(reference)), reference):
        raise wrong("int4_dequantize", what, "differs from the reference")
    moved = int4_kernel.int4_dequantize_bytes(out, columns, GROUP, HALF)
    # Each copy has a result of its own: one that stays in the cache would not have to be written.
    launches = [
        partial(int4_kernel.int4_dequantize, _copied([matrix])[0], 0, torch.empty_like(reference))
        for _ in range(bench.copies(moved))
    ]
    return Row("int4", "int4_dequantize", what, 0, type_name(HALF), moved, bench.time(launches))


def _fits(out: int, columns: int, group: int) -> bool:
    return int4_tiles.tiles((out, columns)) and columns % group == 0


def _packed(bench: Bench, out: int, columns: int, group: int, ordered: bool, index: int) -> Packed:
    """Random codes; rows of about unit gain."""
    generator = torch.Generator(bench.device).manual_seed(SEED + index)
    groups, any_byte = columns // group, partial(torch.randint, 256, dtype=torch.uint8, device=bench.device)
    codes = any_byte(size=(out, columns // 2), generator=generator)
    zeros = any_byte(size=(groups, out // 2), generator=generator)
    scales = bench.normal(groups, out, seed=SEED + index).abs_().add_(0.5).mul_(0.1 / columns**0.5).to(HALF)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(SEED)).to(bench.device)
    return Packed(codes, scales, zeros, int4_codec.as_order(order) if ordered else None, group, not ordered)


def _tiled(made: Sequence[Packed]) -> list[Int4Operand]:
    """As the kernels take them: matrices of one launch have one order."""
    tiled = [int4_tiles.tile(each) for each in made]
    return [Int4Operand(each.codes, each.scales, each.zeros, tiled[0].order, each.group) for each in tiled]


def _copied(matrices: Sequence[Int4Operand]) -> list[Int4Operand]:
    return [
        replace(each, codes=each.codes.clone(), scales=each.scales.clone(), zeros=each.zeros.clone())
        for each in matrices
    ]
