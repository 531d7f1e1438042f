"""Rows of books of 256 codewords (vq2, AQLM's 2x8 and 1x8): products, weights for prefill, and the rotation of vq2.

Products beside cuBLAS with the same weights in 16 bit. Codes are random, codebooks too: neither changes the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from localq.bench.kernels import products
from localq.bench.kernels.shapes import PLAIN, RESIDUAL, Product, Workload
from localq.bench.kernels.table import Row
from localq.bench.kernels.timing import SEED, Bench, check, type_name, wrong
from localq.formats.codebooks import aqlm, dequantize_kernel, lookup_kernel, rotation, rotation_kernel, vq2
from localq.formats.codebooks import tiles as codebook_tiles
from localq.formats.codebooks.definition import dequantize_codes
from localq.formats.codebooks.linear import VqLinear
from localq.formats.codebooks.lookup_kernel import VqBook, VqOperand

Books = tuple[tuple[int, int], ...]  # stride, length of each
VQ2 = "vq2 s4l16"
AQLM = "aqlm 2x8g8"
SCHEMES: dict[str, Books] = {VQ2: ((4, 16),), AQLM: ((8, 8), (8, 8)), "aqlm 1x8g8": ((8, 8),)}
DEQUANTIZED: dict[str, Books] = {**SCHEMES, "vq2 s4l16+s4l16": ((4, 16), (4, 16))}
PLAIN_CASES = ((1, torch.float16), (2, torch.float16), (4, torch.float16), (8, torch.float16), (1, torch.bfloat16))
FUSED_CASES = ((1, torch.float16),)
ROTATED_ROWS = (1, 8)
ROWS_AT_A_TIME = 4096  # of weights that are decoded


def cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """What is to be measured: every product in each scheme, the weights of some, and the rotation of each width."""
    found: list[Callable[[Bench], Row]] = []
    for product in work.nf4:
        for scheme in SCHEMES:
            wanted = PLAIN_CASES if scheme == VQ2 and not product.form else FUSED_CASES
            found += [partial(vq_row, product=product, scheme=scheme, rows=rows, dtype=dtype) for rows, dtype in wanted]
    for product in work.dequantized:
        found += [partial(dequantized_row, product=product, scheme=scheme) for scheme in DEQUANTIZED]
    widths = dict.fromkeys(product.columns for product in work.nf4)
    found += [partial(rotated_row, product=product) for product in work.nf4 if product.form in (PLAIN, RESIDUAL)]
    return found + [partial(hadamard_row, columns=columns, rows=rows) for columns in widths for rows in ROTATED_ROWS]


def vq_row(bench: Bench, product: Product, scheme: str, rows: int, dtype: torch.dtype) -> Row:
    """One `vq_gemv`, checked and timed."""
    given = products.inputs(bench, product, rows, dtype)
    made = [_matrix(bench, out, product.columns, SCHEMES[scheme], SEED + i) for i, out in enumerate(product.outs)]
    matrices, weights = [matrix for matrix, _ in made], [weight for _, weight in made]
    out = torch.empty(rows, product.width, dtype=dtype, device=bench.device)

    def multiply(matrices: Sequence[VqOperand]) -> Tensor:
        return lookup_kernel.vq_gemv(
            given.x, matrices, norm=given.norm, residual=given.residual, activation=given.activation, out=out
        )

    what = f"{products.describe(product)}, {scheme}"
    dense = [weight.to(dtype) for weight in weights]
    check("vq_gemv", what, multiply(matrices), products.exact(given, weights), products.naive(given, dense))
    strides = [stride for stride, _ in SCHEMES[scheme]]
    stored = sum(lookup_kernel.vq_gemv_bytes(0, out, product.columns, strides) for out in product.outs)
    copies = [[_cloned(matrix) for matrix in matrices] for _ in range(bench.copies(stored))]
    timing = bench.time([partial(multiply, each) for each in copies])
    rivals = (products.cublas(bench, given.x, dense),)
    return Row("vq", "vq_gemv", what, rows, type_name(dtype), given.nbytes + stored + out.nbytes, timing, rivals)


def rotated_row(bench: Bench, product: Product) -> Row:
    """One `vq_gemv` of one row that it rotates itself, checked and timed, beside two launches that do the same."""
    given = products.inputs(bench, product, 1, torch.float16)
    signs = rotation.packed_signs(bench.normal(product.columns, seed=SEED + 1) < 0)
    turned = replace(given, x=rotation.rotate(given.x, signs))
    made, weight = _matrix(bench, product.width, product.columns, SCHEMES[VQ2], SEED)
    out, between = torch.empty(1, product.width, dtype=torch.float16, device=bench.device), torch.empty_like(given.x)

    def multiply(matrix: VqOperand) -> Tensor:
        return lookup_kernel.vq_gemv(given.x, [replace(matrix, signs=signs)], residual=given.residual, out=out)

    def both(matrix: VqOperand) -> Tensor:
        rotation_kernel.hadamard(given.x, signs, between)
        return lookup_kernel.vq_gemv(between, [matrix], residual=given.residual, out=out)

    what = f"{products.describe(product)}, {VQ2}, rotated"
    check("vq_gemv", what, multiply(made), products.exact(turned, [weight]), products.naive(turned, [weight.half()]))
    stored = lookup_kernel.vq_gemv_bytes(0, product.width, product.columns) + signs.nbytes
    copies = [_cloned(made) for _ in range(bench.copies(stored))]
    timing = bench.time([partial(multiply, each) for each in copies])
    rivals = (bench.rival("rotated before", [partial(both, each) for each in copies]),)
    return Row("vq", "vq_gemv", what, 1, type_name(given.x.dtype), given.nbytes + stored + out.nbytes, timing, rivals)


def dequantized_row(bench: Bench, product: Product, scheme: str) -> Row:
    """One `vq_dequantize` of a whole matrix to f16, checked bit by bit and timed."""
    linear, reference = _linear(bench, product, scheme)
    assert linear.tiles is not None  # a layout that the kernels read
    codebooks, rounded = [book.values for book in linear.books()], scheme.startswith("aqlm")
    out, what = torch.empty_like(reference), f"{product.name}, {scheme}"
    dequantize_kernel.vq_dequantize(linear.tiles, codebooks, 0, out, rounded=rounded)
    if not torch.equal(out, reference):
        raise wrong("vq_dequantize", what, "differs from the definition")
    strides = [stride for stride, _ in DEQUANTIZED[scheme]]
    moved = dequantize_kernel.vq_dequantize_bytes(product.outs[0], product.columns, strides, out.dtype)
    launches = [
        partial(
            dequantize_kernel.vq_dequantize,
            _cloned(linear.tiles),
            codebooks,
            0,
            torch.empty_like(out),
            rounded=rounded,
        )
        for _ in range(bench.copies(moved))
    ]
    return Row("vq", "vq_dequantize", what, 0, type_name(out.dtype), moved, bench.time(launches))


def hadamard_row(bench: Bench, columns: int, rows: int) -> Row:
    """One `hadamard`, checked bit by bit and timed."""
    x = bench.normal(rows, columns, dtype=torch.float16)
    signs = rotation.packed_signs(bench.normal(columns, seed=SEED + 1) < 0)
    out = torch.empty_like(x)
    rotation_kernel.hadamard(x, signs, out)
    if not torch.equal(out, rotation.rotate(x, signs)):
        raise wrong("hadamard", str(columns), "differs from the definition")
    run = partial(rotation_kernel.hadamard, x, signs, out)
    moved = rotation_kernel.hadamard_bytes(rows, columns)
    return Row("vq", "hadamard", f"{columns}", rows, type_name(x.dtype), moved, bench.time([run, run]))


def _linear(bench: Bench, product: Product, scheme: str) -> tuple[VqLinear, Tensor]:
    """Random codes in tiles, and the weights f16 [out, in] by the definition."""
    out, columns, books = product.outs[0], product.columns, DEQUANTIZED[scheme]
    generator = torch.Generator(bench.device).manual_seed(SEED)
    codes = [
        torch.randint(256, (out, columns // stride), dtype=torch.uint8, device=bench.device, generator=generator)
        for stride, _ in books
    ]
    codebooks = [bench.normal(256, length, dtype=torch.float16, seed=SEED + i) for i, (_, length) in enumerate(books)]
    scales = (0.01 * (1 + 0.1 * bench.normal(out, seed=SEED))).half()
    if scheme.startswith("aqlm"):
        stored = torch.stack([book[:, None] for book in codebooks])
        coded = aqlm.Packed(torch.stack(codes, -1).view(torch.int8), stored, scales.view(-1, 1, 1, 1))
        weight = aqlm.dequantize(coded, torch.float16)
        return aqlm.Linear(coded).put_into_tiles(), weight
    packed = vq2.Packed(tuple(zip(codes, codebooks, strict=True)), scales, None, (out, columns))
    weight = vq2.dequantize(packed, torch.float16)
    return vq2.Linear(packed).put_into_tiles(), weight


def _matrix(bench: Bench, out: int, columns: int, books: Books, seed: int) -> tuple[VqOperand, Tensor]:
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
    factor = codebook_tiles.factor_of(codebooks)
    held = tuple(
        VqBook(codebook_tiles.tile(each), codebook_tiles.fragments(codebook, factor), stride, 0, columns // stride)
        for (stride, _), each, codebook in zip(books, codes, codebooks, strict=True)
    )
    return VqOperand(held, scales, factor, out, columns), weight


def matrix(bench: Bench, out: int, columns: int, seed: int) -> VqOperand:
    """In vq2 of 2 bits, random."""
    return _matrix(bench, out, columns, SCHEMES[VQ2], seed)[0]


def weights_of(matrix: VqOperand) -> Tensor:
    """f32 [out, in] of a matrix as the kernels take it: back from tiles and fragments."""
    total = None
    for book in matrix.books:
        positions = matrix.in_features // book.stride
        codes = codebook_tiles.untile(book.codes.flatten(), (matrix.out_features, book.tile_positions))
        parts = book.fragments.float().view(16, book.steps, 8, 4, 2, 2, 2)  # m, k, g, t, upper columns, upper rows, i
        codebook = parts.permute(0, 5, 2, 1, 4, 3, 6).reshape(1, 256, -1) * matrix.factor
        own, length = codes[:, book.before : book.before + positions, None], codebook.shape[2]
        total = dequantize_codes(own, codebook, book.stride, length, matrix.in_features, total)
    assert total is not None  # there is at least one book
    return total * matrix.scales[:, None].float()


def _cloned(matrix: VqOperand) -> VqOperand:
    """With codes and scales of its own: what must not be found in a cache."""
    books = tuple(
        VqBook(book.codes.clone(), book.fragments, book.stride, book.before, book.tile_positions)
        for book in matrix.books
    )
    return VqOperand(books, matrix.scales.clone(), matrix.factor, matrix.out_features, matrix.in_features)
