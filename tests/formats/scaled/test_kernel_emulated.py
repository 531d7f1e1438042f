"""scaled_gemv and scaled_dequantize compiled for the CPU (vq_machine_on_cpu.cuh): indices, barriers, shares.

Every kind, item, tile and number of rows that the kernels can meet, without a GPU. Products with unit vectors pick
single weights: a wrong code, lane or scale cannot hide in a sum.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from localq.formats.scaled import kernel as scaled_kernel
from localq.formats.scaled import tiles
from localq.formats.scaled.kernel import KINDS
from localq.kernels import gemv
from tests.support.kernels import emulated_products
from tests.support.kernels.cuda_headers import compile_on_cpu
from tests.support.kernels.nf4_operands import bits, inputs
from tests.support.kernels.row_operands import biased, normed
from tests.support.kernels.scaled_operands import VARIANTS, ScaledSample, make

KERNELS = ("scaled/gemv.cu", "scaled/dequantize.cu")
HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Multiprocessors, shared memory of a block: of an H200; of a consumer card; little beside x and its ring.
LARGE, SMALL, TINY = (3, 232_448), (2, 101_376), (1, 36_000)
SUMS = 3e-6  # of sums in f32, over the sum of magnitudes
SOME = ("nvfp4", "fp8 blocks", "int8 g64")


class Matrix(ctypes.Structure):
    """csrc/scaled/scaled.h, ScaledMatrix."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "factors")),
        *((name, ctypes.c_int64) for name in ("out", "columns")),
        *((name, ctypes.c_bool) for name in ("by_row", "divides")),
        ("through", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compile_on_cpu(
        tmp_path_factory.mktemp("library"), "scaled_on_cpu.cpp", KERNELS, faults=("scaled_gemv", "scaled_dequantize")
    )


@pytest.fixture
def emulated(library, monkeypatch):
    """The wrappers of `formats.scaled.kernel` over the kernels on a CPU; `gemv` takes the device first."""
    return emulated_products.install(
        monkeypatch, library, scaled_kernel, Matrix, name="scaled", stored="kind", device=LARGE
    )


def close(got: torch.Tensor, sample: ScaledSample, x: torch.Tensor, slack: float = SUMS) -> None:
    """f32 results against fp64: within the rounding of sums."""
    exact, size = x.double() @ sample.dense.T, x.double().abs() @ sample.dense.abs().T
    assert ((got.double() - exact).abs() <= slack * size + 1e-30).all(), float(((got - exact).abs() / size).max())


def columns_of(variant: str, items: int, rest: int = 0) -> int:
    """Columns of rows of whole items of the kernel and `rest` more blocks."""
    kind = KINDS[variant.partition(",")[0]]
    of_item = {64: 4 if kind.codes_a_byte == 2 else 2, 32: 4, 128: 1}[kind.columns]
    return (items * of_item + rest) * kind.columns


@pytest.mark.parametrize("variant", VARIANTS)
def test_single_columns_come_out(emulated, variant):
    """Of a whole block, and of an item that is not whole: each within the rounding of one product."""
    columns = columns_of(variant, 1, 1)
    sample = make((16, columns), variant, seed=9)
    for first in range(0, columns, 8):
        x = torch.eye(columns, dtype=HALF)[first : first + 8]
        got = emulated.gemv(LARGE, x, [sample.matrix], out=torch.empty(8, 16)).double()
        expected = sample.dense[:, first : first + 8].T
        assert ((got - expected).abs() <= 2**-22 * expected.abs() + 1e-30).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_multiplies_every_weight_once(emulated, variant):
    sample = make((112, columns_of(variant, 3, 1)), variant, seed=3)
    columns = sample.weight.shape[1]
    for device, rows, dtype in ((LARGE, 1, HALF), (SMALL, 7, BF16)):
        x = inputs(rows, columns, dtype, seed=rows)
        close(emulated.gemv(device, x, [sample.matrix], out=torch.full((rows, 112), torch.nan)), sample, x)


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("size", [1e-7, 1e-4, 1.0, 3e4])
def test_x_of_any_size_keeps_its_precision(emulated, variant, dtype, size):
    sample = make((16, 512), variant, seed=5)
    x = (inputs(3, 512, F32) * torch.tensor([[1.0], [0.1], [0.01]]) * size / 4).clamp(-6e4, 6e4).to(dtype)
    close(emulated.gemv(LARGE, x, [sample.matrix], out=torch.empty(3, 16)), sample, x)


def test_bf16_beyond_f16(emulated):
    sample = make((16, 256), "fp8 rows", seed=6)
    for size in (1e-30, 1e30):
        x = (inputs(2, 256, F32) * size).to(BF16)
        close(emulated.gemv(LARGE, x, [sample.matrix], out=torch.empty(2, 16)), sample, x)


@pytest.mark.parametrize("variant", SOME)
def test_rows_of_x_that_do_not_fit_together_are_multiplied_in_parts(emulated, variant):
    sample = make((48, 4096), variant, seed=4)
    x, residual = inputs(7, 4096, HALF), inputs(7, 48, HALF, seed=2)
    got = emulated.gemv(TINY, x, [sample.matrix], residual=residual, out=torch.empty(7, 48))
    exact = x.double() @ sample.dense.T + residual.double()
    size = x.double().abs() @ sample.dense.abs().T + residual.double().abs()
    assert ((got.double() - exact).abs() <= SUMS * size).all()
    wide = make((16, 16_384), variant, seed=4)
    with pytest.raises(ValueError, match="scaled_gemv: in = 16384, is too large for the shared memory of this card"):
        emulated.gemv(TINY, inputs(1, 16_384, HALF), [wide.matrix])


@pytest.mark.parametrize("variant", KINDS)
def test_the_widest_row_fits_on_every_card(emulated, variant):
    sample = make((16, scaled_kernel.WIDEST), variant, seed=1)
    x = inputs(1, scaled_kernel.WIDEST, HALF)
    close(emulated.gemv(SMALL, x, [sample.matrix], out=torch.empty(1, 16)), sample, x)


def test_more_tiles_than_one_wave_has_shares_for(emulated):
    sample = make((1600, 256), "nvfp4", seed=2)
    x = inputs(8, 256, HALF)
    close(emulated.gemv(TINY, x, [sample.matrix], out=torch.empty(8, 1600)), sample, x)


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("kind", ["plain", "offset"])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_three_matrices_with_norm_bias_and_residual(emulated, dtype, kind, variant):
    """Each with its own factor."""
    outs, columns = (48, 16, 96), 768
    samples = [make((out, columns), variant, seed=out) for out in outs]
    x, weight = inputs(1, columns, dtype), torch.rand(columns) + 0.5
    norm = gemv.Norm(weight if kind == "offset" else weight.to(dtype), 1e-5)
    bias, residual = torch.randn(160).to(dtype), torch.randn(1, 160).to(dtype)
    got = emulated.gemv(SMALL, x, biased([each.matrix for each in samples], bias.split(outs)), norm=norm,
                        residual=residual, out=torch.empty(1, 160))  # fmt: skip
    dense = torch.cat([each.dense for each in samples])
    wide = normed(x, norm).double()
    exact = wide @ dense.T + bias.double() + residual.double()
    slack = 3e-4 if dtype == HALF else 3e-3  # x/rms may round to its other neighbour
    assert ((got - exact).abs() <= slack * (wide.abs() @ dense.abs().T) + 1e-6).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [1, 5])
def test_gate_and_up(emulated, variant, rows):
    pair = [make((112, 512), variant, seed=seed) for seed in (1, 2)]
    size = max(float(each.dense.abs().max()) for each in pair)
    x = inputs(rows, 512, BF16) / (16 * size)
    biases = [torch.randn(112).to(BF16) for _ in pair]
    for device in (LARGE, SMALL):
        got = emulated.gemv(device, x, biased([each.matrix for each in pair], biases), activation="silu",
                            out=torch.full((rows, 112), torch.nan))  # fmt: skip
        gate, up = (x.double() @ each.dense.T + bias.double() for each, bias in zip(pair, biases, strict=True))
        torch.testing.assert_close(got.double(), F.silu(gate) * up, rtol=2e-4, atol=2e-4)


def test_results_of_16_bit_are_rounded_once_and_neighbours_stay(emulated):
    sample = make((64, 512), "int8 g32")
    x = inputs(3, 512, BF16)
    wide = emulated.gemv(LARGE, x, [sample.matrix], out=torch.empty(3, 64))
    buffer = torch.full((5, 64), torch.nan, dtype=BF16)
    emulated.gemv(LARGE, x, [sample.matrix], out=buffer[1:4])
    assert torch.equal(buffer[1:4], wide.to(BF16))
    assert buffer[[0, 4]].isnan().all()


@pytest.mark.parametrize("variant", SOME)
def test_what_is_not_finite_stays_in_its_row(emulated, variant):
    sample = make((48, 512), variant)
    x = inputs(5, 512, BF16)
    clean = emulated.gemv(LARGE, x, [sample.matrix])
    x[2, 400], x[4, 70] = torch.inf, torch.nan
    got = emulated.gemv(LARGE, x, [sample.matrix])
    assert torch.equal(bits(got[[0, 1, 3]]), bits(clean[[0, 1, 3]]))
    assert not got[2].isfinite().any()
    assert got[4].isnan().all()


@pytest.mark.parametrize("variant", SOME)
def test_rows_of_zeros(emulated, variant):
    sample = make((16, 256), variant)
    assert not emulated.gemv(LARGE, torch.zeros(2, 256, dtype=HALF), [sample.matrix], out=torch.empty(2, 16)).any()


def test_wrong_tensors_are_named(emulated):
    sample, other = make((16, 256), "nvfp4"), make((16, 256), "fp8 rows")
    x = inputs(1, 256, HALF)
    odd = torch.zeros(16 * 128 + 1, dtype=torch.uint8)[1:].view(16, 128)
    with pytest.raises(ValueError, match="scaled_gemv: codes = 1, bytes past"):
        emulated.gemv(LARGE, x, [replace(sample.matrix, codes=odd)])
    with pytest.raises(ValueError, match="scaled_gemv: a matrix is fp8 rows, the first is nvfp4"):
        emulated.gemv(LARGE, x, [sample.matrix, other.matrix])
    with pytest.raises(ValueError, match=r"scaled_gemv: scales has shape \(8, 16\), must have 256 elements"):
        emulated.gemv(LARGE, x, [replace(sample.matrix, scales=sample.matrix.scales[:8])])
    with pytest.raises(ValueError, match="scaled_gemv: factors is None, fp8 rows has factors"):
        emulated.gemv(LARGE, x, [replace(other.matrix, factors=None)])
    with pytest.raises(ValueError, match="scaled_dequantize: row_begin = 8, must be a row of the matrix, in whole"):
        emulated.dequantize(sample.matrix, 8, torch.empty(8, 256, dtype=HALF))


@pytest.mark.parametrize("dtype", [HALF, BF16, F32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dequantize_is_the_definition_bit_for_bit(emulated, variant, dtype):
    for through in (F32, HALF, BF16) if variant.startswith("int8") else (F32,):
        sample = make((48, columns_of(variant, 2, 1)), variant, seed=7, through=through)
        rows, columns = sample.weight.shape
        buffer = torch.full((rows + 2, columns), torch.nan, dtype=dtype)
        out = emulated.dequantize(sample.matrix, 0, buffer[1:-1])
        expected = sample.weight.to(dtype)
        assert torch.equal(bits(out), bits(expected))
        assert buffer[[0, -1]].isnan().all()
        slab = emulated.dequantize(sample.matrix, 16, torch.empty(16, columns, dtype=dtype))
        assert torch.equal(bits(slab), bits(expected[16:32]))


@pytest.mark.parametrize("variant", KINDS)
def test_tiles_can_be_undone(variant):
    sample = make((48, columns_of(variant, 2)), variant, seed=8)
    plain, tiled = sample.plain, sample.matrix
    assert not torch.equal(plain.codes, tiled.codes)
    found = tiles.untile(variant, tiled.codes, tiled.scales, tiled.zeros)
    for mine, theirs in zip(found, (plain.codes, plain.scales, plain.zeros), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)
