"""Others' ways to the results of our kernels: bitsandbytes, the packages aqlm and vptq, plain Triton kernels.

None is a dependency. A package gets the same matrices in its own order. One that fails is a note with its own words,
one whose result is not the product is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from localq.bench.kernels import triton_rivals
from localq.bench.kernels.table import BITSANDBYTES, NOT_INSTALLED, Rival
from localq.bench.kernels.timing import Bench, guard, is_installed
from localq.formats import nf4
from localq.formats.nf4 import tiles as nf4_tiles
from localq.formats.nf4.kernel import Nf4Operand

AQLM, VPTQ = "aqlm", "vptq"
# How far a package may be from fp64, as a share of the result: it rounds to 16 bits at most 13 times on the way of a
# weight (vptq: two codewords' sum, x times scale and bias, 8 sums of a thread, a block's sum, the result).
PACKAGE_ERROR = 13 * 2.0**-11
Copies = Sequence[Sequence[Any]]  # the operands of a launch, once for each turn
ProductRival = Callable[[Bench, Tensor, Copies, Tensor], Rival]
WeightsRival = Callable[[Bench, Sequence[tuple[Any, Tensor]], Tensor], list[Rival]]


def for_bitsandbytes(matrix: Nf4Operand, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """The codes of a row-by-row matrix and their QuantState; bitsandbytes must be installed."""
    from bitsandbytes.functional import QuantState  # a rival that need not be there

    shape = torch.Size((matrix.out_features, matrix.in_features))
    offset = torch.tensor(matrix.offset, dtype=torch.float32, device=matrix.codes.device)
    nested = QuantState(  # type: ignore[no-untyped-call]  # bitsandbytes' gap, as below
        matrix.nested_absmax, code=matrix.nested_map, blocksize=nf4.NESTED_BLOCK, dtype=torch.float32
    )
    kind = nf4.quantization_config("", [])["bnb_4bit_quant_type"]
    state = QuantState(matrix.absmax, shape, matrix.code_map, nf4.BLOCK, kind, dtype, offset, nested)  # type: ignore[no-untyped-call]
    return matrix.codes.reshape(-1, 1), state


def row_by_row(matrix: Nf4Operand) -> Nf4Operand:
    """The same weights as they are stored."""
    shape = (matrix.out_features, matrix.in_features)
    codes, absmax = nf4_tiles.untile(matrix.codes.view(shape[0], -1), matrix.absmax, shape)
    return replace(matrix, codes=codes, absmax=absmax, tiled=False) if matrix.tiled else matrix


def _bitsandbytes_products(bench: Bench, x: Tensor, copies: Copies) -> Rival:
    if not is_installed(BITSANDBYTES):
        return Rival(BITSANDBYTES, None, NOT_INSTALLED)
    from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]  # a rival that need not be there

    theirs = [[for_bitsandbytes(row_by_row(matrix), x.dtype) for matrix in matrices] for matrices in copies]

    def multiply(operands: Sequence[tuple[Tensor, Any]]) -> None:
        for codes, state in operands:
            matmul_4bit(x, codes, state)

    return bench.rival(BITSANDBYTES, [partial(multiply, operands) for operands in theirs])


def bitsandbytes_products(bench: Bench, x: Tensor, copies: Copies, exact: Tensor) -> Rival:
    """One call a matrix."""
    return guard(BITSANDBYTES, lambda: _bitsandbytes_products(bench, x, copies))


def bitsandbytes_weights(bench: Bench, pairs: Sequence[tuple[Any, Tensor]], reference: Tensor) -> list[Rival]:
    """Its own dequantization."""
    return [guard(BITSANDBYTES, lambda: _bitsandbytes_weights(bench, pairs))]


def _bitsandbytes_weights(bench: Bench, pairs: Sequence[tuple[Any, Tensor]]) -> Rival:
    if not is_installed(BITSANDBYTES):
        return Rival(BITSANDBYTES, None, NOT_INSTALLED)
    from bitsandbytes.functional import dequantize_4bit  # a rival that need not be there

    theirs = [(*for_bitsandbytes(linear.operand(), out.dtype), out) for linear, out in pairs]
    calls = [partial(dequantize_4bit, codes, state, out=out) for codes, state, out in theirs]
    return bench.rival(BITSANDBYTES, calls)


def triton_weights(bench: Bench, pairs: Sequence[tuple[Any, Tensor]], reference: Tensor) -> list[Rival]:
    """Three plain kernels."""
    matrices = [(linear.operand(), out) for linear, out in pairs]
    return [guard(name, partial(_triton, bench, name, matrices, reference)) for name in triton_rivals.VARIANTS]


def _triton(bench: Bench, name: str, pairs: Sequence[tuple[Nf4Operand, Tensor]], reference: Tensor) -> Rival:
    """One of the three variants; one whose weights are more than a rounding off is not timed."""
    if not is_installed("triton"):
        return Rival(name, None, NOT_INSTALLED)
    dequantize = triton_rivals.VARIANTS[name]
    matrix, out = pairs[0]
    out.zero_()
    dequantize(matrix, out)
    if not torch.allclose(out, reference, rtol=2e-3, atol=1e-6):
        return Rival(name, None, "produces wrong dequantized values")
    return bench.rival(name, [partial(dequantize, *pair) for pair in pairs])


def _package(bench: Bench, name: str, launches: Sequence[Callable[[], Tensor]], exact: Tensor) -> Rival:
    """A package's time, unless its result is not the product."""
    off = ((launches[0]().double().view_as(exact) - exact).norm() / exact.norm()).item()
    if not off <= PACKAGE_ERROR:
        return Rival(name, None, f"not measured: the result is off by {off:.2%} (limit: {PACKAGE_ERROR:.2%})")
    return bench.rival(name, launches)


def aqlm_products(bench: Bench, x: Tensor, copies: Copies, exact: Tensor) -> Rival:
    """The package aqlm."""
    if not is_installed(AQLM):
        return Rival(AQLM, None, NOT_INSTALLED)

    def measure() -> Rival:
        from aqlm.inference_kernels import get_forward_pass_kernel  # type: ignore[import-untyped]  # need not be there

        kernel = get_forward_pass_kernel(copies[0][0].codebooks, False)
        return _package(bench, AQLM, [partial(kernel, x, *each.tensors(), None) for (each,) in copies], exact)

    return guard(AQLM, measure)


def vptq_products(bench: Bench, x: Tensor, copies: Copies, exact: Tensor) -> Rival:
    """The package vptq, whose products take 1 and 2 rows."""
    if not is_installed(VPTQ):
        return Rival(VPTQ, None, NOT_INSTALLED)

    def measure() -> Rival:
        from vptq import libvptq  # type: ignore[import-untyped]  # need not be there

        calls = [
            partial(
                libvptq.quant_gemv, x.unsqueeze(0), each.indices, each.centroids, None, each.res_centroids, None, None,
                _order(each.places), each.weight_scale, each.weight_bias, None, each.in_features, each.out_features,
            )
            for (each,) in copies
        ]  # fmt: skip
        return _package(bench, VPTQ, calls, exact)

    return guard(VPTQ, measure) if x.shape[0] < 3 else Rival(VPTQ, None, "supports only 1 or 2 rows")


def _order(places: Tensor | None) -> Tensor | None:
    """Return the column of each place as the package reads it, int16 (bits of a u16)."""
    if places is None:
        return None
    order = torch.argsort(places.int() & 0xFFFF)
    return (order - (order >= 2**15) * 2**16).to(torch.int16)


# Operation -> who else does it; of weights by the label of the row, since these read them row by row.
PRODUCTS: dict[str, tuple[ProductRival, ...]] = {
    "nf4_gemv": (bitsandbytes_products,),
    "nf4_gemm": (bitsandbytes_products,),
    "gather_gemv": (aqlm_products,),
    "vptq_gemv": (vptq_products,),
}
WEIGHTS: dict[tuple[str, str], tuple[WeightsRival, ...]] = {
    ("nf4_dequantize", "row-major"): (bitsandbytes_weights, triton_weights)
}
