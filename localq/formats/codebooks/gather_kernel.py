"""AQLM with one codebook of 16-bit codes, whose codewords are gathered from L2: products, and what bounds gathers.

Checks of the tensors, then the kernels on torch's stream. They work under CUDA graph capture and allocate nothing but
their result. Codebooks and x are of one 16-bit type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kernels
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES, PackedRows, addresses, check, check_cuda, place
from localq.kernels.operand import Operand

GROUPS = (8, 16)  # columns of a codeword of AQLM
SECTOR = 32  # bytes that L2 moves at least
ROOF_STEPS = (16, 32)


@dataclass(frozen=True)
class GatherOperand(PackedRows, Operand):
    """A matrix [out, in] of AQLM with one codebook (`formats.codebooks.aqlm`), in groups of one row.

    codes      i16 [out, in / group, 1]
    codebooks  T   [1, entries, 1, group]    entries a power of two; group 8 or 16, two of them divide `in`
    scales     T   [out, 1, 1, 1]
    """

    codes: Tensor
    codebooks: Tensor
    scales: Tensor

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.codes.shape[1] * self.group

    @property
    def entries(self) -> int:
        """Codewords."""
        return self.codebooks.shape[1]

    @property
    def group(self) -> int:
        """Columns of a codeword."""
        return self.codebooks.shape[3]

    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [self.codes, self.codebooks, self.scales]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self.tensors())

    @property
    def gathered_bytes(self) -> int:
        """A sector for each codeword."""
        return gather_gemv_sectors(self)

    @property
    def key(self) -> tuple[object, ...]:
        """One launch has codebooks of one size and type."""
        return self.codebooks.shape, self.codebooks.dtype

    @property
    def launch(self) -> Callable[..., Tensor]:
        """`gather_gemv`."""
        return gather_gemv

    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """Return whether a kernel reads it: on a GPU, beside x of the type of the codebook."""
        return self.codes.is_cuda and self.codebooks.dtype == dtype


def reads(matrix: GatherOperand) -> bool:
    """Return whether `gather_gemv` reads a matrix of this layout; other layouts of AQLM have other kernels or none."""
    codes, books = matrix.codes, matrix.codebooks
    one = codes.dtype == torch.int16 and books.shape[0] == 1 and books.shape[2] == 1 and books.dtype in HALF_TYPES
    return one and matrix.group in GROUPS and codes.shape[1] % 2 == 0


def gather_gemv(
    x: Tensor,
    operands: Sequence[GatherOperand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + biases for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, sum of outs].

    `operands` share x and have entries and groups of one size: one, or q, k and v, or gate and up; their results lie
    behind each other. With `activation` there are two of one size and y = activation(first) * second. `norm` needs one
    row. `out` may be float32 (logits); else the dtype of x. Sums of codeword * x in f32, then the scale, rounded once:
    W itself is not rounded, as the definition of the format does. The same bits run after run. Raises ValueError by
    the argument's name.

    Bound by sectors of L2: `gather_gemv_sectors` over the roof that `gather_roof` measures is the floor.
    """
    op = "gather_gemv"
    gemv.check_x(op, x, [matrix.codes for matrix in operands])
    for matrix in operands:
        _check_matrix(op, matrix, x)
    out, arguments = gemv.prepare(op, x, operands, norm, residual, activation, out)
    check_cuda(op, "codes", operands[0].codes)
    of_kernel = [
        {
            **addresses(codes=matrix.codes, codebooks=matrix.codebooks, scales=matrix.scales),
            "out_features": matrix.out_features,
            "in_features": matrix.in_features,
            "entries": matrix.entries,
            "group": matrix.group,
        }
        for matrix in operands
    ]  # fmt: skip
    kernels.module().gather_gemv(matrices=of_kernel, **arguments, **place(x))
    return out


def gather_roof(table: Tensor, step: int, loads: int, sums: Tensor) -> Tensor:
    """Reads 16 bytes at random multiples of `step` bytes of `table`, `loads` times in each of sums.numel() threads.

    table  u8 [a power of two of steps of 16 or 32 bytes], aligned to 32      loads  a multiple of 16
    sums   i32 [a multiple of 256], depends on all that was read; returned

    For measuring: `gather_roof_bytes` over its time is what L2 gives to gathers. Raises ValueError by name.
    """
    op, size = "gather_roof", table.numel()
    check(op, "table", table, table.device, (torch.uint8,), size)
    if step not in ROOF_STEPS or size < 2 * step or size & (size - 1):
        raise ValueError(f"{op}: table has {size} bytes for steps of {step}, must be a power of two of 16 or 32")
    check(op, "sums", sums, table.device, (torch.int32,), sums.numel())
    check_cuda(op, "table", table)
    kernels.module().gather_roof(
        table=table.data_ptr(),
        bytes=size,
        step=step,
        loads=loads,
        threads=sums.numel(),
        sums=sums.data_ptr(),
        **place(table),
    )
    return sums


def gather_roof_bytes(loads: int, threads: int) -> int:
    """Bytes of L2 that `gather_roof` moves."""
    return SECTOR * loads * threads


def gather_gemv_bytes(rows: int, matrix: GatherOperand) -> int:
    """Bytes of memory that `gather_gemv` must move: codes, codebook and scales once, x once, y once."""
    size = matrix.scales.element_size()
    return sum(each.nbytes for each in matrix.tensors()) + size * rows * (matrix.out_features + matrix.in_features)


def gather_gemv_sectors(matrix: GatherOperand) -> int:
    """Bytes of L2 that gathers of all codewords move, a sector each."""
    return SECTOR * matrix.codes.numel()


def _check_matrix(op: str, matrix: GatherOperand, x: Tensor) -> None:
    """Raises ValueError, naming the tensor, unless `matrix` is one that the kernel reads beside x [rows, in]."""
    codes, books = matrix.codes, matrix.codebooks
    if codes.dim() != 3 or books.dim() != 4 or codes.shape[2] != 1:
        shapes = f"{tuple(codes.shape)} and {tuple(books.shape)}"
        raise ValueError(f"{op}: codes and codebooks have shapes {shapes}, must be of one codebook")
    if not reads(matrix) or matrix.entries & (matrix.entries - 1) or not 2 <= matrix.entries <= 2**16:
        shape = f"{codes.dtype} {tuple(codes.shape)} of a codebook {books.dtype} {tuple(books.shape)}"
        raise ValueError(f"{op}: codes are {shape}, must be torch.int16 of one with 8 or 16 columns, an even number")
    gemv.check_columns(op, x, matrix.in_features)
    check(op, "codes", codes, x.device, (torch.int16,), codes.numel())
    check(op, "codebooks", books, x.device, (x.dtype,), books.numel())
    check(op, "scales", matrix.scales, x.device, (x.dtype,), codes.shape[0])
