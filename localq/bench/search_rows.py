"""Rows of the search for codes: one block of columns of a matrix, beams as quantization has them.

Instructions bound it, not memory; the share of the roof says only how far from it. Per weight: the time over rows times
`COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from localq.bench.kernel_table import Row
from localq.bench.kernel_timing import SEED, Bench, wrong
from localq.bench.shapes import Product, Workload
from localq.engine import selftest_search
from localq.kernels import search

COLUMNS = 128
STRIDE, LENGTH = 4, 16  # vq2 at 2 bits
BEAMS = (16, 64)


def cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """What is to be measured."""
    return [partial(search_row, product=product, beam=beam) for product in work.dequantized for beam in BEAMS]


def search_row(bench: Bench, product: Product, beam: int) -> Row:
    """One `vq_search` of random weights, after one of weights whose codes are known."""
    rows = product.outs[0]
    what = f"{rows} x {COLUMNS}, beam {beam}"
    known = selftest_search.known(min(rows, 512), COLUMNS, STRIDE, LENGTH, bench.device, SEED)
    if why := known.why_not(beam):
        raise wrong("vq_search", what, why)
    targets = 3 * bench.normal(rows, COLUMNS)
    tails = torch.zeros(rows, LENGTH, device=bench.device)
    prepared = search.prepare(targets, known.feedback, known.white, [known.book], tails, beam)
    moved = search.vq_search_bytes(rows, COLUMNS, COLUMNS // STRIDE, LENGTH)
    return Row("search", "vq_search", what, 0, "float32", moved, bench.time([prepared.launch]))
