"""From how many rows of x on NF4 weights are dequantized and multiplied by cuBLAS, instead of by `nf4_gemm`: data.

`localq bench --crossover` measures it on the GPU it runs on, and prints the line of `MEASURED` for it.

`nf4_gemm` decodes W again for every `ROWS_AT_ONCE` rows of x, so its time is a stair of that width; dequantizing costs
the same for any number of rows, and more than one pass of `nf4_gemm`: it reads W, writes it in 16 bits and reads it
again. A GPU that was not measured takes `DEFAULT`: one pass, and no claim about the second.
"""

from __future__ import annotations

from bisect import bisect_left

ROWS_AT_ONCE = 64  # csrc/nf4/gemm.cu, kRowsAtOnce
BOUNDS = (2**24, 2**26)  # weights of a matrix, up to which the first, the second class go; the third has no end
DEFAULT = (ROWS_AT_ONCE + 1,) * (len(BOUNDS) + 1)

# Name of the GPU as the driver has it -> for each class, the number of rows from which dequantizing is faster.
MEASURED: dict[str, tuple[int, ...]] = {
    "NVIDIA H200": (9, 33, 65),  # driver 580.159.04, CUDA 13.0
}


def class_of(weights: int) -> int:
    """Number of the class of a matrix with so many weights."""
    return bisect_left(BOUNDS, weights)


def rows_from(gpu: str, weights: int) -> int:
    """Rows of x from which a matrix with so many weights is dequantized on the GPU of this name."""
    return MEASURED.get(gpu, DEFAULT)[class_of(weights)]
