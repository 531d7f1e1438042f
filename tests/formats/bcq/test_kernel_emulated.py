"""bcq_gemv and bcq_dequantize, launchers and kernels, compiled for the CPU (vq_machine_on_cpu.cuh).

Every kind of block, tile, chunk and group that the kernels can meet, without a GPU: each sign must meet the x and the
scale that are its own, or sums differ by far more than rounding. Loads of x from shared memory
are counted: none meet in a bank. Operands end where memory ends, so that nothing behind them is read.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from localq import kernels
from localq.formats.bcq import codec as bcq_codec
from localq.formats.bcq import kernel as bcq_kernel
from localq.kernels import gemv
from tests.support.kernels.bcq_operands import BcqSample, by_bits, make
from tests.support.kernels.cuda_headers import compile_on_cpu
from tests.support.kernels.gemv_structs import Extras
from tests.support.kernels.guarded_memory import guarded
from tests.support.kernels.nf4_operands import bits, inputs
from tests.support.kernels.row_operands import biased, normed

# Multiprocessors, shared memory of a block: of an H200, of a consumer card, and one with room for a part of x only.
LARGE, SMALL, ONE, NARROW = (16, 232_448), (6, 101_376), (1, 101_376), (4, 4096)
SUMS = 2e-6  # of some hundred blocks in f32, over the sum of magnitudes


class Matrix(ctypes.Structure):
    """csrc/bcq/gemv.h, BcqMatrix."""

    _fields_ = (
        ("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("planes", ctypes.c_int),
        ("zero_point", ctypes.c_bool), ("group", ctypes.c_int64), ("out", ctypes.c_int64), ("columns", ctypes.c_int64),
    )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compile_on_cpu(
        tmp_path_factory.mktemp("library"),
        "bcq_on_cpu.cpp",
        ["bcq/gemv_launch.cu", "bcq/dequantize.cu"],
        faults=("bcq_gemv", "bcq_dequantize"),
    )


@pytest.fixture
def patched(monkeypatch):
    """Calls with the compiled module replaced."""

    def call(module, device, function, *given, **named):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "module", lambda: SimpleNamespace(**module))
            patch.setattr(bcq_kernel, "check_cuda", lambda *given: None)
            patch.setattr(bcq_kernel, "place", lambda tensor: {"device": device, "stream": 0})
            return function(*given, **named)

    return call


@pytest.fixture
def emulated(library, patched):
    """bcq_gemv on a device (`LARGE` or `SMALL`), by the kernel; conflicts between banks are counted."""
    counts = (ctypes.c_int64 * 4)()

    def run(device, *given, **named):
        def launch(*, x, matrices, y, type, rows, biases, device, stream, **extras):
            all_matrices = (Matrix * len(matrices))(*(Matrix(*each.values()) for each in matrices))
            around = Extras(bias=(ctypes.c_void_p * 3)(*biases), **extras)
            library.bcq_gemv_on_cpu(
                all_matrices, len(matrices), ctypes.byref(around), ctypes.c_void_p(x), ctypes.c_void_p(y), type, rows,
                *device, counts,
            )  # fmt: skip
            assert counts[0] > 0
            assert counts[1] == 0, "conflicts between banks"

        return patched({"bcq_gemv": launch}, device, bcq_kernel.bcq_gemv, *given, **named)

    return run


def at_the_end(operand: BcqSample) -> BcqSample:
    """The same in memory that ends behind each of its tensors."""
    of = operand.matrix
    return replace(operand, matrix=replace(of, codes=guarded(of.codes), scales=guarded(of.scales)))


def close(got: torch.Tensor, operand: BcqSample, x: torch.Tensor) -> None:
    """Within the rounding of sums in f32."""
    expected, size = by_bits(operand, x)
    assert ((got - expected).abs() <= SUMS * size + 1e-9).all(), float(((got - expected).abs() / size).max())


# Planes, columns of a group, is there a zero point, rows of x.
CASES = [
    (3, 32, True, 1), (1, 64, False, 1), (2, 128, True, 1), (4, 512, False, 1), (2, 0, True, 1),
    (2, 32, False, 2), (3, 64, True, 2), (2, 128, False, 3), (1, 32, True, 3), (2, 256, True, 8), (1, 0, False, 8),
]  # fmt: skip


@pytest.mark.parametrize(("planes", "group", "zero_point", "rows"), CASES)
def test_it_multiplies_every_sign_once(emulated, planes, group, zero_point, rows):
    shape = (83 if rows == 1 else 35, 1184)
    operand = at_the_end(make(shape, planes, group, zero_point, seed=group))
    x = guarded(inputs(rows, shape[1], torch.bfloat16 if rows == 2 else torch.float16))
    device = SMALL if planes == 2 else LARGE
    close(emulated(device, x, [operand.matrix], out=torch.full((rows, shape[0]), torch.nan)), operand, x)


@pytest.mark.parametrize("shape", [(1, 8), (15, 328), (16, 3080), (600, 64)], ids=str)
def test_odd_shapes(emulated, shape):
    """One block of threads and many; warps that share a tile, and tiles of their own."""
    operand = at_the_end(make(shape, 5 if shape[0] < 20 else 2, 0, zero_point=shape[0] > 1, seed=3))
    x = guarded(inputs(1, shape[1], torch.bfloat16))
    close(emulated(LARGE, x, [operand.matrix], out=torch.empty(1, shape[0])), operand, x)


@pytest.mark.parametrize(("group", "rows"), [(128, 1), (32, 1), (512, 2)])
def test_x_in_parts(emulated, group, rows):
    """Where shared memory has no room for all of x, sums go on from part to part."""
    operand = at_the_end(make((35, 1864), 2, group, zero_point=True, seed=group))
    x = guarded(inputs(rows, 1864, torch.float16))
    close(emulated(NARROW, x, [operand.matrix], out=torch.empty(rows, 35)), operand, x)


@pytest.mark.parametrize("device", [SMALL, ONE], ids=["small", "one"])
def test_three_matrices_with_norm_bias_and_residual(emulated, device):
    outs, columns = (40, 17, 30), 1152
    operands = [make((out, columns), 3, 128, zero_point=True, seed=out) for out in outs]
    x, weight = inputs(1, columns, torch.float16), torch.rand(columns) + 0.5
    bias, residual = torch.randn(87).half(), torch.randn(1, 87).half()
    norm = gemv.Norm(weight, 1e-5)
    got = emulated(device, x, biased([each.matrix for each in operands], bias.split(outs)), norm=norm,
                   residual=residual, out=torch.empty(1, 87))  # fmt: skip
    parts, sizes = zip(*(by_bits(operand, normed(x, norm)) for operand in operands), strict=True)
    expected, size = torch.cat(parts, 1) + bias.float() + residual.float(), torch.cat(sizes, 1)
    assert ((got - expected).abs() <= 3e-4 * size + 1e-6).all()  # x/rms may round to its other neighbour


@pytest.mark.parametrize("rows", [1, 5])
def test_gate_and_up(emulated, rows):
    pair = [make((41, 1088), 2, 64, seed=seed) for seed in (1, 2)]
    x = inputs(rows, 1088, torch.float16) / 32
    device = SMALL if rows == 1 else ONE
    got = emulated(device, x, [each.matrix for each in pair], activation="silu", out=torch.empty(rows, 41))
    gate, up = (by_bits(each, x)[0] for each in pair)
    torch.testing.assert_close(got, torch.nn.functional.silu(gate) * up, rtol=2e-4, atol=2e-4)


def test_what_is_not_finite_stays_in_its_row(emulated):
    operand = make((19, 320), 1, 128, zero_point=True)
    x = inputs(5, 320, torch.float16)
    clean = emulated(LARGE, x, [operand.matrix])
    x[2, 315], x[4, 70] = torch.inf, torch.nan
    got = emulated(LARGE, x, [operand.matrix])
    assert torch.equal(bits(got[[0, 1, 3]]), bits(clean[[0, 1, 3]]))
    assert got[[2, 4]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "planes", "group"), [((45, 2208), 3, 32), ((16, 1024), 5, 128), ((33, 72), 1, 0)])
def test_weights_bit_for_bit(library, patched, shape, planes, group, dtype):
    operand = at_the_end(make(shape, planes, group, zero_point=planes > 1))
    expected = bcq_codec.dequantize(operand.packed, dtype)

    def launch(*, matrix, out, type, row_begin, row_count, device, stream):
        library.bcq_dequantize_on_cpu(
            ctypes.byref(Matrix(*matrix.values())), ctypes.c_void_p(out), type, ctypes.c_int64(row_begin),
            ctypes.c_int64(row_count),
        )  # fmt: skip

    for first, count in ((0, shape[0]), (shape[0] // 16 * 16 - 16, 13)):
        buffer = torch.full((count + 2, shape[1]), torch.nan, dtype=dtype)
        patched({"bcq_dequantize": launch}, 0, bcq_kernel.bcq_dequantize, operand.matrix, first, buffer[1:-1])
        assert torch.equal(bits(buffer[1:-1]), bits(expected[first : first + count]))
        assert buffer[[0, -1]].isnan().all()


def test_the_launcher_refuses_by_name(emulated):
    operand, other = make((16, 64), 2, 32), make((16, 64), 3, 32)
    x = inputs(1, 64, torch.float16)
    with pytest.raises(ValueError, match="bcq_gemv: planes = 3, must be those of the first matrix"):
        emulated(LARGE, x, [operand.matrix, other.matrix])
    with pytest.raises(ValueError, match="bcq_gemv: group = 64, must be that of the first matrix"):
        emulated(LARGE, x, [operand.matrix, make((16, 64), 2, 0).matrix])
