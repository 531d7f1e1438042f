"""rowlut_gemv and rowlut_dequantize, compiled for the CPU (tests/support/kernels/row_machine_on_cpu.cuh), against fp64.

How blocks, tiles and groups of tiles are cut is that of a GPU of few multiprocessors, and of little shared memory.
Conflicts between banks are counted, where tables are made and where they and x are read: there are none.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from localq.kernels import gemv
from localq.kernels.checks import TYPES
from tests.support.kernels.cuda_headers import compile_on_cpu
from tests.support.kernels.gemv_structs import Extras
from tests.support.kernels.guarded_memory import guarded
from tests.support.kernels.nf4_operands import inputs
from tests.support.kernels.row_operands import ROWLUT, ROWLUT_TILES, biased, normed, rowlut_weights

KERNELS = ("rowlut/gemv.cu", "rowlut/dequantize.cu")
HALF, BF16 = torch.float16, torch.bfloat16
LARGE, SMALL = 232_448, 101_376  # shared memory of a block, of an H200 and of a consumer card
POINTER, LONG = ctypes.c_void_p, ctypes.c_int64


class Matrix(ctypes.Structure):
    """csrc/rowlut/rowlut.h, RowLut."""

    _fields_ = (("codes", POINTER), ("table", POINTER), ("out", LONG), ("columns", LONG), ("tiled", ctypes.c_bool))


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compile_on_cpu(
        tmp_path_factory.mktemp("library"), "rowlut_on_cpu.cpp", KERNELS, faults=("rowlut_gemv", "rowlut_dequantize")
    )


def in_guarded_memory(matrix):
    return replace(matrix, codes=guarded(matrix.codes), table=guarded(matrix.table))


def matrix_of(matrix) -> Matrix:
    return Matrix(
        matrix.codes.data_ptr(), matrix.table.data_ptr(), matrix.out_features, matrix.in_features, matrix.tiled
    )


class Machine:
    """The kernels on so many multiprocessors; counts conflicts between banks."""

    def __init__(self, library, multiprocessors=3, shared_bytes=LARGE):
        self.library, self.sizes = library, (multiprocessors, shared_bytes)
        self.conflicts = 0

    def gemv(self, x, matrices, *, out, norm=None, residual=None, activation=None):
        """All that it reads and writes ends where memory ends."""
        given_out, out, x = out, guarded(out), guarded(x)
        matrices = [in_guarded_memory(each) for each in matrices]
        _, told = gemv.prepare("rowlut_gemv", x, matrices, norm, residual, activation, out)
        bias = (POINTER * gemv.SEGMENTS)(*told["biases"])
        extras = Extras(*(told[name] for name in ("norm", "norm_weight", "eps", "residual", "activation")), bias,
                        told["y_is_f32"])  # fmt: skip
        given, counts = (Matrix * len(matrices))(*map(matrix_of, matrices)), (LONG * 4)()
        self.library.rowlut_gemv_on_cpu(
            given, len(matrices), ctypes.byref(extras), POINTER(x.data_ptr()), POINTER(out.data_ptr()), TYPES[x.dtype],
            len(x), *self.sizes, counts,
        )  # fmt: skip
        assert counts[0] > 0
        assert counts[2] > 0
        self.conflicts += counts[1] + counts[3]
        return given_out.copy_(out)


def allowed(x, operand):
    """What f32 sums may be off by, and in bf16 what is too small beside the largest of x; f64 [rows, out]."""
    wide, dense = x.double(), operand.dense.double()
    lost = 2.0**-39 * wide.abs().amax(1, keepdim=True) * dense.abs().sum(1)
    return 1e-6 * wide.abs() @ dense.abs().T + (lost if x.dtype == BF16 else 0)


FORMS = pytest.mark.parametrize("form", [ROWLUT, ROWLUT_TILES], ids=["rows", "tiles"])


@FORMS
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (15, 160), (37, 1632), (70, 96), (58, 224)], ids=str)
def test_it_is_as_near_as_sums_in_f32(library, shape, dtype, form):
    """Tiles of the last shape are cut between groups of 8 rows, of which there are enough; those of 37 within them."""
    shape = form.shape(*shape)
    machine, operand = Machine(library), form.make(shape, dtype, 1, "cpu")
    x = inputs(8, shape[1], dtype)
    exact, results = x.double() @ operand.dense.double().T, []
    for rows in (1, 3, 8):
        results.append(machine.gemv(x[:rows], [operand.matrix], out=torch.full((rows, shape[0]), torch.nan)))
        assert ((results[-1] - exact[:rows]).abs() <= allowed(x[:rows], operand)).all()
    assert all(torch.equal(each[0], results[0][0]) for each in results)  # whatever the others are
    assert machine.conflicts == 0


@FORMS
def test_every_code_of_every_column_is_its_own_value(library, form):
    """x = unit vectors: a wrong nibble, lane, row or tile of the table cannot hide in a sum."""
    shape = form.shape(37, 192)
    machine, operand = Machine(library, 1), form.make(shape, HALF, 3, "cpu")
    codes = (torch.arange(shape[0] * shape[1] // 2) * 91 % 256).to(torch.uint8).view(shape[0], -1)
    matrix = replace(operand.matrix, codes=codes)
    dense = rowlut_weights(matrix, torch.float32)
    for first in range(0, shape[1], 8):
        x = torch.eye(shape[1], dtype=HALF)[first : first + 8]
        got = machine.gemv(x, [matrix], out=torch.full((8, shape[0]), torch.nan))
        assert torch.equal(got, dense[:, first : first + 8].T)


@FORMS
@pytest.mark.parametrize("shape", [(33, 9312), (105, 2592)], ids=str)
def test_warps_have_one_batch_of_a_tile_or_several(library, shape, form):
    """73 steps of a row for 16 warps: 4 or 5 each, in 2 or 3 batches. 21: 1 or 2, in one; 7 tiles."""
    shape = form.shape(*shape)
    machine, operand = Machine(library, 1), form.make(shape, HALF, 7, "cpu")
    x = inputs(3, shape[1], HALF)
    got = machine.gemv(x, [operand.matrix], out=torch.full((3, shape[0]), torch.nan))
    assert ((got - x.double() @ operand.dense.double().T).abs() <= allowed(x, operand)).all()
    assert machine.conflicts == 0


def test_tiles_and_rows_give_the_same_bits(library):
    """Wherever blocks and matrices begin: three matrices of 40, 8 and 24 rows, by 2 blocks or 14."""
    shapes, x = ((40, 896), (8, 896), (24, 896)), inputs(2, 896, HALF)
    results = [
        Machine(library, multiprocessors).gemv(
            x, [form.make(shape, HALF, shape[0], "cpu").matrix for shape in shapes], out=torch.full((2, 72), torch.nan)
        )
        for form in (ROWLUT, ROWLUT_TILES)
        for multiprocessors in (1, 7)
    ]
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_neither_blocks_nor_shared_memory_change_a_bit(library, dtype):
    """One or two tables, x in shared memory or not, few tiles' shares or many."""
    operand, x = ROWLUT.make((49, 352), dtype, 2, "cpu"), inputs(7, 352, dtype)
    first = Machine(library, 1).gemv(x, [operand.matrix], out=torch.full((7, 49), torch.nan))
    assert ((first - x.double() @ operand.dense.double().T).abs() <= allowed(x, operand)).all()
    for multiprocessors, shared in ((3, LARGE), (1, SMALL), (1, 80_000), (7, 80_000)):
        machine = Machine(library, multiprocessors, shared)
        assert torch.equal(machine.gemv(x, [operand.matrix], out=torch.full((7, 49), torch.nan)), first)
        assert machine.conflicts == 0


def test_two_tables_and_x_where_it_is(library):
    operand, x = ROWLUT.make((34, 4384), BF16, 2, "cpu"), inputs(8, 4384, BF16)
    results = [
        Machine(library, 1, shared).gemv(x, [operand.matrix], out=torch.full((8, 34), torch.nan))
        for shared in (150_000, LARGE)
    ]
    assert torch.equal(*results)


def test_what_does_not_fit_is_refused(library):
    operand, x = ROWLUT.make((20, 32), BF16, 2, "cpu"), inputs(8, 32, BF16)
    with pytest.raises(ValueError, match="rows = 8, need more shared memory"):
        Machine(library, 1, 80_000).gemv(x, [operand.matrix], out=torch.empty(8, 20))
    norm = gemv.Norm(torch.ones(32, dtype=BF16), 1e-5)
    with pytest.raises(ValueError, match="in = 32, is too large for a norm"):
        Machine(library, 1, 67_800).gemv(x[:1], [operand.matrix], norm=norm, out=torch.empty(1, 20))


@pytest.mark.parametrize("kind", ["plain", "offset"])
@FORMS
def test_norm_three_matrices_biases_and_residual(library, kind, form):
    shapes, dtype = [form.shape(out, 352) for out in (33, 16, 7)], BF16
    (outs, (columns, *_)), operands = (
        zip(*shapes, strict=True),
        [form.make(each, dtype, each[0], "cpu") for each in shapes],
    )
    generator = torch.Generator().manual_seed(3)
    weight = torch.rand(columns, generator=generator) + 0.5
    norm = gemv.Norm(weight if kind == "offset" else weight.to(dtype), 1e-5)
    bias, residual = (torch.randn(shape, generator=generator).to(dtype) for shape in ((sum(outs),), (1, sum(outs))))
    x = inputs(1, columns, dtype)
    got = Machine(library).gemv(
        x, biased([each.matrix for each in operands], bias.split(outs)), norm=norm, residual=residual,
        out=torch.empty(1, sum(outs)),
    )  # fmt: skip
    wide = normed(x, norm)
    exact = torch.cat([wide.double() @ each.dense.double().T for each in operands], 1)
    bound = torch.cat([allowed(wide, each) for each in operands], 1) + 0.01 * exact.abs().mean()  # a norm of 1 ulp more
    assert ((got - exact - bias.double() - residual.double()).abs() <= bound).all()


@FORMS
@pytest.mark.parametrize("rows", [1, 3])
def test_gate_and_up(library, rows, form):
    out, columns = form.shape(45, 160)
    operands = [form.make((out, columns), HALF, seed, "cpu") for seed in (1, 2)]
    x = inputs(rows, columns, HALF) / 32
    got = Machine(library, 2).gemv(x, [each.matrix for each in operands], activation="silu", out=torch.empty(rows, out))
    first, second = (x.double() @ each.dense.double().T for each in operands)
    size = allowed(x, operands[0]) * second.abs() + (first.abs() + 1) * allowed(x, operands[1])
    assert ((got - F.silu(first) * second).abs() <= 2 * size + 1e-6 * (first * second).abs()).all()


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row(library, value, dtype):
    operand, x = ROWLUT.make((19, 96), dtype, 1, "cpu"), inputs(4, 96, dtype)
    clean = Machine(library).gemv(x, [operand.matrix], out=torch.empty(4, 19))
    x[1, 95], x[3] = value, 0
    got = Machine(library).gemv(x, [operand.matrix], out=torch.empty(4, 19))
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
    expected = value * operand.dense[:, 95] if dtype == HALF else torch.full((19,), torch.nan)
    assert torch.equal(got[1].isnan(), expected.isnan())
    assert torch.equal(got[1].nan_to_num(0.0), expected.nan_to_num(0.0))
    assert not got[3].any()


def dequantize(library, matrix, first: int, out) -> None:
    """Rows of `matrix` from `first` on into `out`."""
    library.rowlut_dequantize_on_cpu(
        ctypes.byref(matrix_of(matrix)), POINTER(out.data_ptr()), TYPES[out.dtype], LONG(first), LONG(len(out))
    )


@FORMS
@pytest.mark.parametrize("dtype", [HALF, BF16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (9, 1048), (3, 2056)], ids=str)
def test_weights_come_out_bit_for_bit(library, shape, dtype, form):
    shape = form.shape(*shape) if form is ROWLUT_TILES else shape  # 8 columns do, where nothing is multiplied
    matrix = in_guarded_memory(form.make(shape, dtype, 4, "cpu").matrix)
    expected = rowlut_weights(matrix, dtype)
    for first, last in ((0, shape[0]), (shape[0] // 2, shape[0]), (shape[0] // 3, shape[0] // 3 + 1)):
        out = torch.full((last - first, shape[1]), torch.nan, dtype=dtype)
        dequantize(library, matrix, first, out)
        assert torch.equal(out, expected[first:last])


def test_tiles_that_are_none_are_refused(library):
    for shape, said in (((9, 256), "out = 9, must be a multiple of 8"), ((16, 192), "in = 192, must be a multiple of")):
        matrix = replace(ROWLUT.make(shape, HALF, 1, "cpu").matrix, tiled=True)
        with pytest.raises(ValueError, match=said):
            dequantize(library, matrix, 0, torch.empty(shape))
        with pytest.raises(ValueError, match=said):
            Machine(library).gemv(inputs(1, shape[1], HALF), [matrix], out=torch.empty(1, shape[0]))
    rows, tiles = (form.make((16, 256), HALF, 1, "cpu").matrix for form in (ROWLUT, ROWLUT_TILES))
    with pytest.raises(ValueError, match="tiled = 1, must be that of the first"):
        Machine(library).gemv(inputs(1, 256, HALF), [rows, tiles], out=torch.empty(1, 32))
