"""rowlut_gemv and rowlut_dequantize, compiled for the CPU (tests/support/row_machine_on_cpu.cuh), against fp64.

How blocks, tiles, groups of tiles and rows of x are cut is that of a GPU of few multiprocessors, and of little shared
memory. Conflicts between banks where x is read are counted: there are none.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from cuda_headers import built
from nf4_operands import inputs
from row_operands import ROWLUT, normed
from torch.nn import functional as F

from localq.kernels import gemv
from localq.kernels.checks import TYPES
from localq.quant import squeezellm

ROOT = Path(__file__).parents[2]
KERNELS = ("rowlut_gemv.cu", "rowlut_dequantize.cu")
SOURCES = ("rowlut.h", "launchers.h", "gemv.h", "check.h", *KERNELS)
HALF, BF16 = torch.float16, torch.bfloat16
LARGE, SMALL = 232_448, 101_376  # shared memory of a block, of an H200 and of a consumer card
STEP = 1 / 63000  # of the largest value of a row
POINTER, LONG, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class Matrix(ctypes.Structure):
    """csrc/rowlut.h, RowLut."""

    _fields_ = (("codes", POINTER), ("table", POINTER), ("out", LONG), ("columns", LONG))


class Extras(ctypes.Structure):
    """csrc/gemv.h, GemvExtras."""

    _fields_ = (
        ("norm", INT), ("norm_weight", POINTER), ("eps", ctypes.c_float), ("residual", POINTER), ("activation", INT),
        ("bias", POINTER * gemv.SEGMENTS), ("y_is_f32", ctypes.c_bool),
    )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("library")
    shutil.copy(ROOT / "tests/support/launch_on_cpu.h", folder / "launch.h")
    found = built(folder, SOURCES, "rowlut_on_cpu.cpp", KERNELS)
    found.rowlut_gemv_on_cpu.restype = found.rowlut_dequantize_on_cpu.restype = ctypes.c_char_p
    found.rowlut_widest_on_cpu.restype = LONG
    return found


def matrix_of(matrix) -> Matrix:
    return Matrix(matrix.codes.data_ptr(), matrix.table.data_ptr(), matrix.out_features, matrix.in_features)


class Machine:
    """The kernels on so many multiprocessors; counts conflicts between banks."""

    def __init__(self, library, multiprocessors=3, shared_bytes=LARGE):
        self.library, self.sizes = library, (multiprocessors, shared_bytes)
        self.conflicts = 0

    def gemv(self, x, matrices, *, out, biases=None, norm=None, residual=None, activation=None):
        outs = [each.out_features for each in matrices]
        _, told = gemv.prepared("rowlut_gemv", x, outs, biases, norm, residual, activation, out)
        bias = (POINTER * gemv.SEGMENTS)(*told["biases"])
        extras = Extras(*(told[name] for name in ("norm", "norm_weight", "eps", "residual", "activation")), bias,
                        told["y_is_f32"])  # fmt: skip
        given, counts = (Matrix * len(matrices))(*map(matrix_of, matrices)), (LONG * 2)()
        fault = self.library.rowlut_gemv_on_cpu(
            given, len(matrices), ctypes.byref(extras), POINTER(x.data_ptr()), POINTER(out.data_ptr()), TYPES[x.dtype],
            len(x), *self.sizes, counts,
        )  # fmt: skip
        if fault is not None:
            raise ValueError(fault.decode())
        assert counts[0] > 0
        self.conflicts += counts[1]
        return out


def allowed(x, operand):
    """What f32 sums and the fixed points of x and of the table may be off by; f64 [rows, out]."""
    wide, dense = x.double(), operand.dense.double()
    size, largest = wide.abs() @ dense.abs().T, operand.matrix.table.double().abs().amax(1)
    x_step = wide.abs().amax(1, keepdim=True) / 8.3e6
    return 1e-6 * size + STEP * wide.abs().sum(1, keepdim=True) * largest + 1.1 * x_step * dense.abs().sum(1)


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (15, 160), (37, 1632), (130, 96)], ids=str)
def test_it_is_as_near_as_its_fixed_points(library, shape, dtype):
    machine, operand = Machine(library), ROWLUT.make(shape, dtype, 1, "cpu")
    x = inputs(8, shape[1], dtype)
    exact, results = x.double() @ operand.dense.double().T, []
    for rows in (1, 2, 5, 8):
        results.append(machine.gemv(x[:rows], [operand.matrix], out=torch.full((rows, shape[0]), torch.nan)))
        assert ((results[-1] - exact[:rows]).abs() <= allowed(x[:rows], operand)).all()
    assert all(torch.equal(each[0], results[0][0]) for each in results)  # whatever the others are
    assert machine.conflicts == 0


def test_every_code_of_every_column_is_its_own_value(library):
    """x = unit vectors: a wrong nibble, lane or row of the table cannot hide in a sum."""
    machine, operand = Machine(library), ROWLUT.make((35, 64), HALF, 3, "cpu")
    bound = 1.01 * STEP * operand.matrix.table.float().abs().amax(1)
    for first in range(0, 64, 8):
        x = torch.eye(64, dtype=HALF)[first : first + 8]
        got = machine.gemv(x, [operand.matrix], out=torch.empty(8, 35))
        assert ((got - operand.dense[:, first : first + 8].T).abs() <= bound).all()


def test_tables_at_the_borders_of_bytes(library):
    """Low bytes of -1, 0 and the largest, in every pair of entries that share a look-up."""
    codes = (torch.arange(16) | torch.arange(16).flip(0) << 4).to(torch.uint8).repeat(64, 1)
    steps = torch.tensor([0, -1, 1, -2, 126, -126, 252, -253, -127, 127, 31500, -31500, 251, -251, -378, 5])
    generator = torch.Generator().manual_seed(5)
    order = torch.stack([torch.randperm(16, generator=generator) for _ in range(64)])
    table = (steps[order] / 31500).half()
    matrix = ROWLUT.make((64, 32), HALF, 0, "cpu").matrix.__class__(codes, table)
    dense = squeezellm.dequantize(squeezellm.Packed(codes, table), torch.float32)
    for column in range(0, 32, 8):
        got = Machine(library).gemv(torch.eye(32, dtype=HALF)[column : column + 8], [matrix], out=torch.empty(8, 64))
        assert ((got - dense[:, column : column + 8].T).abs() <= 1.01 * STEP).all()


def test_little_shared_memory_takes_rows_and_tables_in_parts(library):
    """A narrow device: 8 rows of x do not fit, nor the tables of a block's rows, nor two tiles of shares."""
    operand = ROWLUT.make((120, 32), BF16, 2, "cpu")
    for shared, rows in ((15_500, 8), (15_500, 6), (20_000, 7)):  # as 5 and 3, 5 and 1, 6 and 1
        x, machine = inputs(rows, 32, BF16), Machine(library, 1, shared)
        got = machine.gemv(x, [operand.matrix], out=torch.full((rows, 120), torch.nan))
        assert ((got - x.double() @ operand.dense.double().T).abs() <= allowed(x, operand)).all()
    assert library.rowlut_widest_on_cpu(SMALL) >= 28672
    assert library.rowlut_widest_on_cpu(LARGE) >= 65536
    with pytest.raises(ValueError, match="too large for the shared memory"):
        Machine(library, 1, 2_000).gemv(inputs(8, 32, BF16), [operand.matrix], out=torch.empty(8, 120))


@pytest.mark.parametrize("kind", ["plain", "offset"])
def test_norm_three_matrices_biases_and_residual(library, kind):
    outs, columns, dtype = (33, 16, 7), 352, BF16
    operands = [ROWLUT.make((out, columns), dtype, out, "cpu") for out in outs]
    generator = torch.Generator().manual_seed(3)
    weight = torch.rand(columns, generator=generator) + 0.5
    norm = gemv.Norm(weight if kind == "offset" else weight.to(dtype), 1e-5)
    bias, residual = (torch.randn(shape, generator=generator).to(dtype) for shape in ((56,), (1, 56)))
    x = inputs(1, columns, dtype)
    got = Machine(library).gemv(
        x, [each.matrix for each in operands], biases=list(bias.split(outs)), norm=norm, residual=residual,
        out=torch.empty(1, 56),
    )  # fmt: skip
    wide = normed(x, norm)
    exact = torch.cat([wide.double() @ each.dense.double().T for each in operands], 1)
    bound = torch.cat([allowed(wide, each) for each in operands], 1) + 0.01 * exact.abs().mean()  # a norm of 1 ulp more
    assert ((got - exact - bias.double() - residual.double()).abs() <= bound).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_gate_and_up(library, rows):
    operands = [ROWLUT.make((45, 160), HALF, seed, "cpu") for seed in (1, 2)]
    x = inputs(rows, 160, HALF) / 32
    got = Machine(library, 2).gemv(x, [each.matrix for each in operands], activation="silu", out=torch.empty(rows, 45))
    first, second = (x.double() @ each.dense.double().T for each in operands)
    size = allowed(x, operands[0]) * second.abs() + (first.abs() + 1) * allowed(x, operands[1])
    assert ((got - F.silu(first) * second).abs() <= 2 * size + 1e-6 * (first * second).abs()).all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row(library, value):
    operand, x = ROWLUT.make((19, 96), BF16, 1, "cpu"), inputs(4, 96, BF16)
    clean = Machine(library).gemv(x, [operand.matrix], out=torch.empty(4, 19))
    x[1, 95], x[3] = value, 0
    got = Machine(library).gemv(x, [operand.matrix], out=torch.empty(4, 19))
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
    assert got[1].isnan().all()
    assert not got[3].any()


@pytest.mark.parametrize("dtype", [HALF, BF16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (9, 1048), (3, 2056)], ids=str)
def test_weights_come_out_bit_for_bit(library, shape, dtype):
    operand = ROWLUT.make(shape, dtype, 4, "cpu")
    expected = squeezellm.dequantize(squeezellm.Packed(operand.matrix.codes, operand.matrix.table), dtype)
    for first in (0, shape[0] // 2):
        out = torch.full((shape[0] - first, shape[1]), torch.nan, dtype=dtype)
        given = matrix_of(operand.matrix)
        pointer = POINTER(out.data_ptr())
        fault = library.rowlut_dequantize_on_cpu(
            ctypes.byref(given), pointer, TYPES[dtype], LONG(first), LONG(len(out))
        )
        assert fault is None
        assert torch.equal(out, expected[first:])
