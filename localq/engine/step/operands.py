"""The linears of a decode step as operands of matrix-vector kernels, whatever the format of their weights.

A model's linears are `nn.Linear` (16-bit weights) or those of a format: `quant.nf4`, `quant.mxfp4`, `quant.int8`,
`quant.vq2`, and `quant.aqlm` and `quant.vptq` in the layouts that a kernel reads. An operand holds what the kernel of
that format takes; several of one format that read the same x go into one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor, nn

from localq.formats.bcq import Linear as BcqLinear
from localq.formats.bcq import kernel as bcq_kernel
from localq.formats.bcq.kernel import BcqMatrix
from localq.formats.codebooks import gather_kernel, lookup_kernel
from localq.formats.codebooks.aqlm import Linear as AqlmLinear
from localq.formats.codebooks.gather_kernel import GatherMatrix
from localq.formats.codebooks.lookup_kernel import VqMatrix
from localq.formats.codebooks.unpack_kernel import VptqMatrix
from localq.formats.codebooks.vq2 import Linear as Vq2Linear
from localq.formats.int4 import kernel as int4_kernel
from localq.formats.int4.kernel import Int4Matrix
from localq.formats.int4.linear import Int4Linear
from localq.formats.int8 import Linear as Int8Linear
from localq.formats.int8 import kernel as int8_kernel
from localq.formats.int8.kernel import Int8Matrix
from localq.formats.mxfp4 import Linear as Mxfp4Linear
from localq.formats.mxfp4 import kernel as mxfp4_kernel
from localq.formats.mxfp4.kernel import Mxfp4Matrix
from localq.formats.nf4 import Linear as Nf4Linear
from localq.formats.nf4 import kernel as nf4_kernel
from localq.formats.nf4.kernel import Nf4Matrix
from localq.formats.squeezellm import Linear as SqueezeLlmLinear
from localq.formats.squeezellm import kernel as squeezellm_kernel
from localq.formats.squeezellm.kernel import RowLutMatrix
from localq.formats.vptq import Linear as VptqLinear
from localq.kernels import dense, gemv
from localq.kernels.checks import HALF_TYPES

_TILE_ROWS = 16  # rows that the tiled order of NF4 keeps together
Matrix = (
    Tensor
    | Nf4Matrix
    | Mxfp4Matrix
    | Int8Matrix
    | Int4Matrix
    | GatherMatrix
    | VptqMatrix
    | VqMatrix
    | BcqMatrix
    | RowLutMatrix
)


_GEMV: dict[type, tuple[ModuleType, str]] = {  # what multiplies a matrix of each kind, all with the same arguments
    Tensor: (dense, "dense_gemv"),
    Nf4Matrix: (nf4_kernel, "nf4_gemv"),
    Int8Matrix: (int8_kernel, "int8_gemv"),
    Int4Matrix: (int4_kernel, "int4_gemv"),
    Mxfp4Matrix: (mxfp4_kernel, "mxfp4_gemv"),
    RowLutMatrix: (squeezellm_kernel, "rowlut_gemv"),
    VqMatrix: (lookup_kernel, "vq_gemv"),
    BcqMatrix: (bcq_kernel, "bcq_gemv"),
    GatherMatrix: (gather_kernel, "gather_gemv"),
    VptqMatrix: (gather_kernel, "vptq_gemv"),
}


@dataclass(frozen=True)
class Operand:
    """One matrix [out, in]: a Tensor of 16-bit weights, or the tensors of a format; bias [out] or None.

    signs   where the matrix multiplies a rotated x (`kernels.hadamard`), those of the rotation u8 [in / 8]: the launch
            of a `VqMatrix`, which alone has them, rotates x itself
    """

    matrix: Matrix
    bias: Tensor | None
    out_features: int
    in_features: int
    signs: Tensor | None = None

    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """The kernels read it beside x of `dtype`: on a GPU, in a quantized format or 16 bits, rows of whole 16-byte
        loads, codebooks in the type of x."""
        if isinstance(self.matrix, Int4Matrix):
            return self.matrix.codes.is_cuda and int4_kernel.reads(self.matrix)
        if isinstance(self.matrix, GatherMatrix):
            return self.matrix.codes.is_cuda and self.matrix.codebooks.dtype == dtype
        if isinstance(self.matrix, VptqMatrix):
            return self.matrix.indices.is_cuda and self.matrix.centroids.dtype == dtype
        if isinstance(self.matrix, Tensor):
            fits = self.matrix.dtype in HALF_TYPES and self.in_features % dense.COLUMNS == 0
            return fits and self.matrix.is_cuda
        return self.matrix.codes.is_cuda

    def bytes(self) -> int:
        """Bytes that a product reads of it, the bias included."""
        bias = 0 if self.bias is None else self.bias.nbytes
        if isinstance(self.matrix, Nf4Matrix):
            return bias + nf4_kernel.nf4_weight_bytes(self.matrix.count, self.matrix.nested_absmax is not None)
        if isinstance(self.matrix, Int8Matrix | Mxfp4Matrix):
            return bias + self.matrix.codes.nbytes + self.matrix.scales.nbytes
        if isinstance(self.matrix, GatherMatrix | VptqMatrix):
            return bias + sum(each.nbytes for each in self.matrix.tensors())
        return bias + self.matrix.nbytes


def operand(module: nn.Module) -> Operand | None:
    """`module` as an operand; None for a kind of module that has no kernel."""
    if isinstance(module, Nf4Linear):
        return Operand(module.matrix, module.bias, module.out_features, module.in_features)
    if isinstance(module, Mxfp4Linear):
        blocks = module.matrix
        return Operand(blocks, module.bias, *module.shape) if mxfp4_kernel.reads(blocks) else None
    if isinstance(module, SqueezeLlmLinear):
        return Operand(module.matrix, module.bias, *module.shape) if module.multiplies else None
    if isinstance(module, Int4Linear):
        of_int4 = module.matrix
        return None if of_int4 is None else Operand(of_int4, module.bias, *module.shape)
    if isinstance(module, Int8Linear):
        return Operand(module.matrix, module.bias, module.out_features, module.in_features)
    if isinstance(module, Vq2Linear):
        return None if module.matrix is None else Operand(module.matrix, module.bias, *module.shape, module.signs)
    if isinstance(module, BcqLinear):
        return None if module.matrix is None else Operand(module.matrix, module.bias, *module.shape)
    if isinstance(module, AqlmLinear) and module.matrix is not None:
        return Operand(module.matrix, module.bias, *module.shape)
    if isinstance(module, AqlmLinear | VptqLinear):
        gathered = module.gather
        return None if gathered is None else Operand(gathered, module.bias, *module.shape)
    return dense_operand(module.weight, module.bias) if isinstance(module, nn.Linear) else None


def dense_operand(weight: Tensor, bias: Tensor | None = None) -> Operand:
    """A matrix [out, in] of plain weights as an operand."""
    out_features, in_features = weight.shape
    return Operand(weight.detach(), None if bias is None else bias.detach(), out_features, in_features)


def with_shared_tables(operands: Sequence[Operand]) -> list[Operand]:
    """The same, with the small tables of NF4, the order of GPTQ's columns and the signs of rotations of the first
    wherever theirs are equal: one launch has one table, and one x.

    Compares on the device and waits for it: for load time.
    """
    first, signs = operands[0].matrix, operands[0].signs
    operands = [replace(each, signs=signs) if _equal(each.signs, signs) else each for each in operands]
    return [replace(each, matrix=_sharing(each.matrix, first)) for each in operands]


def _sharing(matrix: Matrix, first: Matrix) -> Matrix:
    if isinstance(matrix, Nf4Matrix) and isinstance(first, Nf4Matrix):
        return _with_tables(matrix, first)
    if isinstance(matrix, Int4Matrix) and isinstance(first, Int4Matrix) and _equal(matrix.order, first.order):
        return replace(matrix, order=first.order)
    return matrix


def _equal(mine: Tensor | None, theirs: Tensor | None) -> bool:
    return mine is not None and theirs is not None and torch.equal(mine, theirs)


def _with_tables(matrix: Nf4Matrix, other: Nf4Matrix) -> Nf4Matrix:
    if torch.equal(matrix.code_map, other.code_map):
        matrix = replace(matrix, code_map=other.code_map)
    mine, theirs = matrix.nested_map, other.nested_map
    if mine is not None and theirs is not None and torch.equal(mine, theirs):
        matrix = replace(matrix, nested_map=theirs)
    return matrix


def fusable(operands: Sequence[Operand]) -> bool:
    """One launch can take them all: few enough, of one format, in one order, with the same tables and the same x."""
    kinds = {(_kind(each.matrix), None if each.signs is None else each.signs.data_ptr()) for each in operands}
    return len(operands) <= gemv.SEGMENTS and len(kinds) == 1


def _kind(matrix: Matrix) -> tuple[object, ...]:
    """Equal for matrices that one launch can take."""
    if isinstance(matrix, Nf4Matrix):
        nested = None if matrix.nested_map is None else matrix.nested_map.data_ptr()
        return Nf4Matrix, matrix.tiled, matrix.code_map.data_ptr(), nested
    if isinstance(matrix, Int4Matrix):
        order = None if matrix.order is None else matrix.order.data_ptr()
        return Int4Matrix, matrix.group, matrix.scales.dtype, order
    if isinstance(matrix, GatherMatrix):
        return GatherMatrix, matrix.codebooks.shape, matrix.codebooks.dtype
    if isinstance(matrix, VptqMatrix):
        return VptqMatrix, matrix.centroids.shape, matrix.centroids.dtype, matrix.residuals, matrix.words
    if isinstance(matrix, VqMatrix):
        places = tuple((book.stride, book.steps, book.before, book.tile_positions) for book in matrix.books)
        return VqMatrix, places, matrix.scales.dtype
    if isinstance(matrix, RowLutMatrix):
        return RowLutMatrix, matrix.tiled
    if isinstance(matrix, BcqMatrix):
        return BcqMatrix, matrix.planes, matrix.zero_point, matrix.group
    return (type(matrix) if isinstance(matrix, Int8Matrix | Mxfp4Matrix) else Tensor,)


def halves(whole: Operand) -> tuple[Operand, Operand] | None:
    """The first and the second half of the rows, as views; None where the format cannot be cut there."""
    rows = whole.out_features // 2
    if whole.out_features % 2 or not isinstance(whole.matrix, Tensor | Nf4Matrix):
        return None
    biases = (None, None) if whole.bias is None else (whole.bias[:rows], whole.bias[rows:])
    if isinstance(whole.matrix, Nf4Matrix):
        parts = _nf4_halves(whole.matrix, rows)
        if parts is None:
            return None
        first, second = parts
        return (
            Operand(first, biases[0], rows, whole.in_features),
            Operand(second, biases[1], rows, whole.in_features),
        )
    return (
        Operand(whole.matrix[:rows], biases[0], rows, whole.in_features),
        Operand(whole.matrix[rows:], biases[1], rows, whole.in_features),
    )


def _nf4_halves(matrix: Nf4Matrix, rows: int) -> tuple[Nf4Matrix, Nf4Matrix] | None:
    """Cut between tiles, and between the groups of blocks that share a nested scale."""
    blocks = rows * matrix.in_features // nf4_kernel.BLOCK
    if rows % _TILE_ROWS or (matrix.nested_absmax is not None and blocks % nf4_kernel.NESTED_BLOCK):
        return None
    codes, absmax, nested = matrix.codes.view(-1), matrix.absmax.view(-1), matrix.nested_absmax
    cut, groups = rows * matrix.in_features // 2, blocks // nf4_kernel.NESTED_BLOCK
    first = replace(
        matrix,
        codes=codes[:cut],
        absmax=absmax[:blocks],
        nested_absmax=None if nested is None else nested[:groups],
        out_features=rows,
    )
    second = replace(
        matrix,
        codes=codes[cut:],
        absmax=absmax[blocks:],
        nested_absmax=None if nested is None else nested[groups:],
        out_features=rows,
    )
    return first, second


def product(
    x: Tensor,
    operands: Sequence[Operand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor,
) -> None:
    """out = residual + norm(x) W^T + bias, the results of `operands` behind each other; x T [rows <= 8, in].

    With `activation` there are two and out = activation(first) * second. One launch where they are `fusable`, else one
    each, for one row and without an activation or a residual. Operands with signs rotate x, and take one row.
    out [rows, sum of outs] in T or float32.
    """
    if fusable(operands):
        _launch(x, operands, norm, residual, activation, out)
        return
    if x.shape[0] != 1 or activation is not None or residual is not None:
        raise ValueError("product: operands of different formats take one row, no activation and no residual")
    start = 0
    for each in operands:
        _launch(x, [each], norm, None, None, out[:, start : start + each.out_features])
        start += each.out_features


def _launch(
    x: Tensor,
    operands: Sequence[Operand],
    norm: gemv.Norm | None,
    residual: Tensor | None,
    activation: str | None,
    out: Tensor,
) -> None:
    biases, matrices = [each.bias for each in operands], [each.matrix for each in operands]
    module, name = _GEMV[type(matrices[0]) if not isinstance(matrices[0], Tensor) else Tensor]
    run = getattr(module, name)  # by name: tests put others there
    around = {} if operands[0].signs is None else {"signs": operands[0].signs}
    run(x, matrices, biases=biases, norm=norm, residual=residual, activation=activation, out=out, **around)
