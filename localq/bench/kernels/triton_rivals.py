"""Plain Triton kernels that dequantize double-quantized NF4, in the manner of published ones; rivals, not used.

Three variants. "triton two-step": one kernel decodes the scales to f32 in memory, a second one the weights. "triton
fused": one kernel for both; each nibble of a byte is stored by itself, every second element. "triton joined": as fused,
the two nibbles interleaved first, so that the stores are whole lines.

Triton comes with most GPU builds of torch and is no dependency: it is imported at the first call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from localq.formats.nf4.kernel import BLOCK, NESTED_BLOCK, Nf4Operand

BYTES = 1024  # codes that one program takes
SCALES = 1024  # scales that one program of the first step takes


def _two_step(matrix: Nf4Operand, out: Tensor) -> None:
    from localq.bench.kernels import triton_kernels as kernels  # needs triton

    count = matrix.codes.numel()
    blocks = matrix.absmax.numel()
    absmax = torch.empty(blocks, dtype=torch.float32, device=out.device)
    kernels.decode_scales[(-(-blocks // SCALES),)](
        matrix.absmax, matrix.nested_absmax, matrix.nested_map, matrix.offset, absmax, blocks,
        PER_NESTED=NESTED_BLOCK, SIZE=SCALES,
    )  # fmt: skip
    kernels.decode_weights[(-(-count // BYTES),)](
        matrix.codes, absmax, matrix.code_map, out, count, PER_BLOCK=BLOCK // 2, SIZE=BYTES
    )


def _fused(matrix: Nf4Operand, out: Tensor, joined: bool = False) -> None:
    from localq.bench.kernels import triton_kernels as kernels  # needs triton

    count = matrix.codes.numel()
    kernels.decode_fused[(-(-count // BYTES),)](
        matrix.codes, matrix.absmax, matrix.nested_absmax, matrix.nested_map, matrix.offset, matrix.code_map, out,
        count, PER_BLOCK=BLOCK // 2, PER_NESTED=NESTED_BLOCK, SIZE=BYTES, JOINED=joined,
    )  # fmt: skip


def _joined(matrix: Nf4Operand, out: Tensor) -> None:
    _fused(matrix, out, joined=True)


# Name -> dequantize(matrix row by row and double-quantized, out [out, in]).
VARIANTS: dict[str, Callable[[Nf4Operand, Tensor], None]] = {
    "triton two-step": _two_step,
    "triton fused": _fused,
    "triton joined": _joined,
}
