"""Rows of what makes 2 bits: the search for codes, of one block of columns, and the adjoint of decoding a matrix.

Instructions bound the search, not memory; the share of the roof says only how far from it. Per weight: the time over
rows times `COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from localq.bench.kernels.shapes import Product, Workload
from localq.bench.kernels.table import Row
from localq.bench.kernels.timing import SEED, Bench, wrong
from localq.engine.selftest import search as selftest_search
from localq.formats.codebooks import adjoint_kernel, search_kernel

COLUMNS = 128
STRIDE, LENGTH = 4, 16  # vq2 at 2 bits
BEAMS = (16, 64)


def cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """Return the rows to measure for `work`, one callable each."""
    found: list[Callable[[Bench], Row]] = []
    for product in work.dequantized:
        found += [partial(search_row, product=product, beam=beam) for beam in BEAMS]
        found += [partial(adjoint_row, product=product)]
    return found


def search_row(bench: Bench, product: Product, beam: int) -> Row:
    """One `vq_search` of random weights, after one of weights whose codes are known."""
    rows = product.outs[0]
    what = f"{rows} x {COLUMNS}, beam {beam}"
    known = selftest_search.known(min(rows, 512), COLUMNS, STRIDE, LENGTH, bench.device, SEED)
    if why := known.why_not(beam):
        raise wrong("vq_search", what, why)
    targets = 3 * bench.normal(rows, COLUMNS)
    tails = torch.zeros(rows, LENGTH, device=bench.device)
    prepared = search_kernel.prepare(targets, known.feedback, known.white, [known.book], tails, beam)
    moved = search_kernel.vq_search_bytes(rows, COLUMNS, COLUMNS // STRIDE, LENGTH)
    return Row("search", "vq_search", what, 0, "float32", moved, bench.time([prepared.launch]))


def adjoint_row(bench: Bench, product: Product) -> Row:
    """One `vq_adjoint` of a random matrix, after a look at its sums."""
    rows, columns = product.outs[0], product.columns
    matrix, what = bench.normal(rows, columns), f"{rows} x {columns}, s{STRIDE}l{LENGTH}"
    generator = torch.Generator(bench.device).manual_seed(SEED)
    codes = torch.randint(
        search_kernel.ENTRIES, (rows, columns // STRIDE), generator=generator, dtype=torch.uint8, device=bench.device
    )
    if why := selftest_search.why_no_adjoint(matrix, codes, STRIDE, LENGTH):
        raise wrong("vq_adjoint", what, why)
    moved = adjoint_kernel.vq_adjoint_bytes(rows, columns, STRIDE)
    copies = [(matrix.clone(), codes.clone()) for _ in range(bench.copies(moved))]
    runs = [partial(adjoint_kernel.vq_adjoint, *each, STRIDE, LENGTH) for each in copies]
    return Row("search", "vq_adjoint", what, 0, "float32", moved, bench.time(runs))
