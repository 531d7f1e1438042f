"""`localq bench --crossover`: from how many rows of x on NF4 weights are better dequantized and left to cuBLAS.

Both ways are compared with each other and timed cold (`roofline.time_cold`), on a wide and a tall matrix of every class
of `formats.nf4.crossover`. The last output is this GPU's line of that file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import torch
from torch import Tensor

from localq import kernels
from localq.bench.conditions.conditions import conditions
from localq.bench.kernels.timing import SEED, Bench, check, exact_product
from localq.engine.load import device as devices
from localq.errors import ExitCode, LocalqError
from localq.formats import nf4
from localq.formats.nf4 import crossover
from localq.formats.nf4 import kernel as nf4_kernel
from localq.formats.nf4.kernel import Nf4Operand
from localq.sanitize import print_lines, write_json

# Class by class, as `crossover.BOUNDS` cuts them: 8B's q and k, 70B's q and 8B's MLP, 70B's MLP.
SHAPES = (((4096, 4096), (1024, 4096)), ((8192, 8192), (4096, 14336)), ((28672, 8192), (8192, 28672)))
# nf4_gemm takes as long for the rows between two of these as for the upper one.
ROWS = (16, 32, *range(64, 513, 64), 768, 1024)
FEWEST = 9  # rows that no matrix-vector kernel takes
DTYPE = torch.float16


@dataclass(frozen=True)
class Point:
    """Both ways on one shape [out, in], in microseconds."""

    shape: tuple[int, int]
    rows: int
    gemm_us: float
    dequantize_us: float


def run(
    out: TextIO,
    shapes: Sequence[Sequence[tuple[int, int]]] = SHAPES,
    rows: Sequence[int] = ROWS,
    replays: int = 20,
) -> dict[str, Any]:
    """Measure all classes, report to `out`, and return the object of its last line.

    Raises LocalqError: exit 7 without a GPU or kernels, 1 where the kernel gives a wrong result.
    """
    device = devices.pick("cuda").device
    if why := kernels.why_not():
        raise LocalqError("bench --crossover", why, "`localq doctor` shows what is missing.", ExitCode.NO_DEVICE)
    bench = Bench(device, int(torch.cuda.get_device_properties(device).L2_cache_size), replays)
    print_lines(out, f"{'out x in':>14} {'rows':>5} {'nf4_gemm':>10} {'dequantize + cuBLAS':>20}")
    points = [[point for shape in each for point in _measure(bench, shape, rows, out)] for each in shapes]
    found = tuple(rows_from(each) for each in points)
    gpu = torch.cuda.get_device_name(device)
    print_lines(out, f"\nlocalq/formats/nf4/crossover.py, MEASURED:\n    {line(gpu, found)}")
    result = {
        "schema": 1,
        **conditions(device, SEED),
        "class_bounds_weights": list(crossover.BOUNDS),
        "rows_from": list(found),
        "points": [vars(point) for each in points for point in each],
    }
    write_json(out, result)
    return result


def rows_from(points: Sequence[Point]) -> int:
    """Rows from which dequantizing is faster on a class, for good: its shapes added up, as a model has them together.

    Where it never is, one more than was tried: beyond that nothing is known, and cuBLAS only gains.
    """
    slower = [FEWEST - 1]
    for rows in {point.rows for point in points}:
        here = [point for point in points if point.rows == rows]
        if sum(point.gemm_us for point in here) <= sum(point.dequantize_us for point in here):
            slower.append(rows)
    return max(slower) + 1


def line(gpu: str, rows: tuple[int, ...]) -> str:
    """An entry of `crossover.MEASURED`."""
    return f'"{gpu}": {rows!r},'


def _measure(bench: Bench, shape: tuple[int, int], rows: Sequence[int], out: TextIO) -> list[Point]:
    packed = nf4.sample(shape, SEED, bench.device)
    weight = nf4.dequantize(packed, torch.float32)
    matrix = nf4.Linear(packed).tile_().operand()
    matrices = [matrix.copy() for _ in range(bench.copies(matrix.nbytes))]
    dense = torch.empty(shape, dtype=DTYPE, device=bench.device)
    points = []
    for count in rows:
        x = bench.normal(count, shape[1], dtype=DTYPE, seed=SEED + count)
        y = torch.empty(count, shape[0], dtype=DTYPE, device=bench.device)
        point = Point(shape, count, *_times(bench, weight, matrices, x, y, dense))
        print_lines(
            out, f"{shape[0]:>6} x {shape[1]:<5} {count:>5} {point.gemm_us:>7.1f} µs {point.dequantize_us:>17.1f} µs"
        )
        points.append(point)
    torch.cuda.empty_cache()
    return points


def _times(
    bench: Bench, weight: Tensor, matrices: Sequence[Nf4Operand], x: Tensor, y: Tensor, dense: Tensor
) -> tuple[float, float]:
    """Microseconds of `nf4_gemm` and of the other way, which dequantizes into the scratch `dense`; all write `y`."""

    def dequantized(matrix: Nf4Operand) -> None:
        nf4_kernel.nf4_dequantize(matrix, DTYPE, dense)
        torch.mm(x, dense.T, out=y)

    got = nf4_kernel.nf4_gemm(x, matrices[0]).clone()
    dequantized(matrices[0])
    check("nf4_gemm", f"{tuple(dense.shape)}, {x.shape[0]} rows", got, exact_product(x, weight), y)
    ways: list[list[Callable[[], object]]] = [
        [partial(nf4_kernel.nf4_gemm, x, matrix, out=y) for matrix in matrices],
        [partial(dequantized, matrix) for matrix in matrices],
    ]
    gemm, other = (bench.time(way).median_us for way in ways)
    return gemm, other
