"""Rows of NF4 dequantization, row by row and tiled, beside bitsandbytes and three plain Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from localq.bench.kernels import triton_rivals
from localq.bench.kernels.nf4_weights import Weights, copies, for_bitsandbytes
from localq.bench.kernels.shapes import Product, Workload
from localq.bench.kernels.table import BITSANDBYTES, NOT_INSTALLED, Rival, Row
from localq.bench.kernels.timing import SEED, Bench, guarded, installed, type_name, wrong
from localq.formats.nf4 import kernel as nf4_kernel
from localq.formats.nf4.kernel import Nf4Operand

Pair = tuple[Nf4Operand, Tensor]  # a matrix, and where its weights go


def cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """What is to be measured; the rivals read row by row, so they stand under that row."""
    return [
        partial(dequantize_row, product=product, dtype=torch.float16, tiled=tiled)
        for product in work.dequantized
        for tiled in (False, True)
    ]


def dequantize_row(bench: Bench, product: Product, dtype: torch.dtype, tiled: bool) -> Row:
    """One `nf4_dequantize`, checked bit by bit and timed."""
    shape = (product.outs[0], product.columns)
    weights = Weights.random(shape, bench.device, SEED)
    reference = weights.dense(dtype)
    matrix = weights.tiled() if tiled else weights.matrix
    what = f"{product.name}, {'tiled' if tiled else 'row by row'}"
    if not torch.equal(nf4_kernel.nf4_dequantize(matrix, dtype), reference):
        raise wrong("nf4_dequantize", what, "differs from the reference")
    moved = nf4_kernel.nf4_dequantize_bytes(shape, dtype)
    # Each copy has a result of its own: one that stays in the cache would not have to be written.
    pairs = [(each, torch.empty_like(reference)) for each in copies(matrix, bench.copies(moved))]
    timing = bench.time([partial(nf4_kernel.nf4_dequantize, each, dtype, out) for each, out in pairs])
    rivals: list[Rival] = []
    if not tiled:
        rivals.append(guarded(BITSANDBYTES, lambda: _bitsandbytes(bench, pairs)))
        rivals += [guarded(name, partial(_triton, bench, name, pairs, reference)) for name in triton_rivals.VARIANTS]
    return Row("dequantize", "nf4_dequantize", what, 0, type_name(dtype), moved, timing, tuple(rivals))


def _bitsandbytes(bench: Bench, pairs: list[Pair]) -> Rival:
    if not installed(BITSANDBYTES):
        return Rival(BITSANDBYTES, None, NOT_INSTALLED)
    from bitsandbytes.functional import dequantize_4bit  # a rival that need not be there

    theirs = [(*for_bitsandbytes(matrix, out.dtype), out) for matrix, out in pairs]
    calls = [partial(dequantize_4bit, codes, state, out=out) for codes, state, out in theirs]
    return bench.rival(BITSANDBYTES, calls)


def _triton(bench: Bench, name: str, pairs: list[Pair], reference: Tensor) -> Rival:
    """One of the three variants; one whose weights are more than a rounding off is not timed."""
    if not installed("triton"):
        return Rival(name, None, NOT_INSTALLED)
    dequantize = triton_rivals.VARIANTS[name]
    matrix, out = pairs[0]
    out.zero_()
    dequantize(matrix, out)
    if not torch.allclose(out, reference, rtol=2e-3, atol=1e-6):
        return Rival(name, None, "gives wrong weights here")
    return bench.rival(name, [partial(dequantize, *pair) for pair in pairs])
