"""Rows of the products with books of 256 codewords (vq2, AQLM's 2x8 and 1x8), and of the rotation before those of vq2.

Beside cuBLAS with the same weights in 16 bit. Codes are random, codebooks too: neither changes the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from localq.bench import products
from localq.bench.kernel_table import Row
from localq.bench.kernel_timing import SEED, Bench, check, type_name, wrong
from localq.bench.shapes import Product, Workload
from localq.kernels import hadamard, vq
from localq.kernels.vq import VqBook, VqMatrix
from localq.quant import hadamard as rotation
from localq.quant import vq_tiles
from localq.quant.additive import dequantize_codes

Books = tuple[tuple[int, int], ...]  # stride, length of each
VQ2 = "vq2 s4l16"
SCHEMES: dict[str, Books] = {VQ2: ((4, 16),), "aqlm 2x8g8": ((8, 8), (8, 8)), "aqlm 1x8g8": ((8, 8),)}
PLAIN_CASES = ((1, torch.float16), (2, torch.float16), (4, torch.float16), (8, torch.float16), (1, torch.bfloat16))
FUSED_CASES = ((1, torch.float16),)
ROTATED_ROWS = (1, 8)
ROWS_AT_A_TIME = 4096  # of weights that are decoded


def cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """What is to be measured: every product in each scheme, and the rotation of each width."""
    found: list[Callable[[Bench], Row]] = []
    for product in work.nf4:
        for scheme in SCHEMES:
            wanted = PLAIN_CASES if scheme == VQ2 and not product.form else FUSED_CASES
            found += [partial(vq_row, product=product, scheme=scheme, rows=rows, dtype=dtype) for rows, dtype in wanted]
    widths = dict.fromkeys(product.columns for product in work.nf4)
    return found + [partial(hadamard_row, columns=columns, rows=rows) for columns in widths for rows in ROTATED_ROWS]


def vq_row(bench: Bench, product: Product, scheme: str, rows: int, dtype: torch.dtype) -> Row:
    """One `vq_gemv`, checked and timed."""
    given = products.inputs(bench, product, rows, dtype)
    made = [_matrix(bench, out, product.columns, SCHEMES[scheme], SEED + i) for i, out in enumerate(product.outs)]
    matrices, weights = [matrix for matrix, _ in made], [weight for _, weight in made]
    out = torch.empty(rows, product.width, dtype=dtype, device=bench.device)

    def multiply(matrices: Sequence[VqMatrix]) -> Tensor:
        return vq.vq_gemv(
            given.x, matrices, norm=given.norm, residual=given.residual, activation=given.activation, out=out
        )

    what = f"{products.describe(product)}, {scheme}"
    dense = [weight.to(dtype) for weight in weights]
    check("vq_gemv", what, multiply(matrices), products.exact(given, weights), products.naive(given, dense))
    strides = [stride for stride, _ in SCHEMES[scheme]]
    stored = sum(vq.vq_gemv_bytes(0, out, product.columns, strides) for out in product.outs)
    copies = [[_cloned(matrix) for matrix in matrices] for _ in range(bench.copies(stored))]
    timing = bench.time([partial(multiply, each) for each in copies])
    rivals = (products.cublas(bench, given.x, dense),)
    return Row("vq", "vq_gemv", what, rows, type_name(dtype), given.nbytes + stored + out.nbytes, timing, rivals)


def hadamard_row(bench: Bench, columns: int, rows: int) -> Row:
    """One `hadamard`, checked bit by bit and timed."""
    x = bench.normal(rows, columns, dtype=torch.float16)
    signs = rotation.packed_signs(bench.normal(columns, seed=SEED + 1) < 0)
    out = torch.empty_like(x)
    hadamard.hadamard(x, signs, out)
    if not torch.equal(out, rotation.rotate(x, signs)):
        raise wrong("hadamard", str(columns), "differs from the definition")
    run = partial(hadamard.hadamard, x, signs, out)
    moved = hadamard.hadamard_bytes(rows, columns)
    return Row("vq", "hadamard", f"{columns}", rows, type_name(x.dtype), moved, bench.time([run, run]))


def _matrix(bench: Bench, out: int, columns: int, books: Books, seed: int) -> tuple[VqMatrix, Tensor]:
    """Random codes and codebooks, and the weights f32 [out, in]."""
    codebooks = [bench.normal(256, length, dtype=torch.float16, seed=seed + i) for i, (_, length) in enumerate(books)]
    generator = torch.Generator(bench.device).manual_seed(seed)
    codes = [
        torch.randint(256, (out, columns // stride), dtype=torch.uint8, device=bench.device, generator=generator)
        for stride, _ in books
    ]
    scales = (0.01 * (1 + 0.1 * bench.normal(out, seed=seed))).half()
    weight = torch.empty(out, columns, device=bench.device)
    for first in range(0, out, ROWS_AT_A_TIME):
        rows = slice(first, first + ROWS_AT_A_TIME)
        total = None
        for (stride, length), each, codebook in zip(books, codes, codebooks, strict=True):
            total = dequantize_codes(each[rows, :, None], codebook[None], stride, length, columns, total)
        assert total is not None  # there is at least one book
        weight[rows] = total * scales[rows, None].float()
    factor = vq_tiles.factor_of(codebooks)
    held = tuple(
        VqBook(vq_tiles.tile(each), vq_tiles.fragments(codebook, factor), stride, 0, columns // stride)
        for (stride, _), each, codebook in zip(books, codes, codebooks, strict=True)
    )
    return VqMatrix(held, scales, factor, out, columns), weight


def _cloned(matrix: VqMatrix) -> VqMatrix:
    """With codes and scales of its own: what must not be found in a cache."""
    books = tuple(
        VqBook(book.codes.clone(), book.fragments, book.stride, book.before, book.tile_positions)
        for book in matrix.books
    )
    return VqMatrix(books, matrix.scales.clone(), matrix.factor, matrix.out_features, matrix.in_features)
