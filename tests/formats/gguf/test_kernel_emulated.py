"""gguf_gemv and gguf_dequantize compiled for the CPU (vq_machine_on_cpu.cuh): indices, barriers, shares.

Every block type, item, tile and number of rows that the kernels can meet, without a GPU. Products with unit vectors
pick single weights: a wrong code, lane or scale cannot hide in a sum.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from localq.files.gguf.block_types import by_name
from localq.formats.gguf import codec, tiles
from localq.formats.gguf import kernel as gguf_kernel
from localq.kernels import gemv
from tests.support.kernels import emulated_products
from tests.support.kernels.cuda_headers import compile_on_cpu
from tests.support.kernels.gguf_operands import SOURCES, GgufSample, make
from tests.support.kernels.nf4_operands import bits, inputs
from tests.support.kernels.row_operands import biased, normed

KERNELS = [f"gguf/{name}.cu" for name in SOURCES]
HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Multiprocessors, shared memory of a block: of an H200; of a consumer card; little beside x and its ring.
LARGE, SMALL, TINY = (3, 232_448), (2, 101_376), (1, 36_000)
SUMS = 3e-6  # of sums in f32, over the sum of magnitudes
TYPES = tiles.TILED_TYPES


class Matrix(ctypes.Structure):
    """csrc/gguf/gguf.h, GgufMatrix."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("blocks", "places")),
        *((name, ctypes.c_int64) for name in ("out", "columns")),
        ("factor", ctypes.c_float),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compile_on_cpu(
        tmp_path_factory.mktemp("library"), "gguf_on_cpu.cpp", KERNELS, faults=("gguf_gemv", "gguf_dequantize")
    )


@pytest.fixture
def emulated(library, monkeypatch):
    """The wrappers of `formats.gguf.kernel` over the kernels on a CPU; `gemv` takes the device first."""
    return emulated_products.install(
        monkeypatch, library, gguf_kernel, Matrix, name="gguf", stored="block_type", device=LARGE
    )


def close(got: torch.Tensor, sample: GgufSample, x: torch.Tensor, slack: float = SUMS) -> None:
    """f32 results against fp64: within the rounding of sums and of the weights' definition in f32.

    Minimums are summed apart: their magnitude counts beside that of the weights.
    """
    exact, size = x.double() @ sample.dense.T, x.double().abs() @ magnitude(sample).T
    assert ((got.double() - exact).abs() <= slack * size + 1e-30).all(), float(((got - exact).abs() / size).max())


def magnitude(sample: GgufSample) -> torch.Tensor:
    """f64 [out, in]: magnitude of scale * code plus that of the minimum, at most."""
    dense, kind = sample.dense.abs(), by_name(sample.packed.type)
    if sample.packed.type not in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"):
        return dense
    most = dense.view(len(dense), -1, kind.values).amax(-1).repeat_interleave(kind.values, 1)
    return dense + most


def columns_of(type: str, items: int, rest: int = 0) -> int:
    """Columns of rows of whole items of the kernel and `rest` more blocks."""
    kind = by_name(type)
    of_item = 4 if type in ("Q8_0", "NVFP4") else 8 if kind.values == 32 else 1
    return (items * of_item + rest) * kind.values


@pytest.mark.parametrize("type", TYPES)
def test_single_columns_come_out(emulated, type):
    """Of a whole block, and of an item that is not whole: each within the rounding of one product."""
    columns = columns_of(type, 1, 1 if by_name(type).values < 256 else 0)
    sample = make((16, columns), type, seed=9)
    weight = sample.dense
    size = magnitude(sample)
    for first in range(0, columns, 8):
        x = torch.eye(columns, dtype=HALF)[first : first + 8]
        got = emulated.gemv(LARGE, x, [sample.matrix], out=torch.empty(8, 16)).double()
        expected = weight[:, first : first + 8].T
        assert ((got - expected).abs() <= 2**-21 * size[:, first : first + 8].T + 1e-30).all()


@pytest.mark.parametrize("type", TYPES)
def test_it_multiplies_every_weight_once(emulated, type):
    sample = make((112, columns_of(type, 3, 1)), type, seed=3)
    columns = sample.packed.shape[1]
    for device, rows, dtype in ((LARGE, 1, HALF), (SMALL, 7, BF16)):
        x = inputs(rows, columns, dtype, seed=rows)
        got = emulated.gemv(device, x, [sample.matrix], out=torch.full((rows, 112), torch.nan))
        close(got, sample, x)


@pytest.mark.parametrize("type", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("size", [1e-7, 1e-4, 1.0, 3e4])
def test_x_of_any_size_keeps_its_precision(emulated, type, dtype, size):
    sample = make((16, 512), type, seed=5)
    x = (inputs(3, 512, F32) * torch.tensor([[1.0], [0.1], [0.01]]) * size / 4).clamp(-6e4, 6e4).to(dtype)
    close(emulated.gemv(LARGE, x, [sample.matrix], out=torch.empty(3, 16)), sample, x)


def test_bf16_beyond_f16(emulated):
    sample = make((16, 256), "Q4_K", seed=6)
    for size in (1e-30, 1e30):
        x = (inputs(2, 256, F32) * size).to(BF16)
        close(emulated.gemv(LARGE, x, [sample.matrix], out=torch.empty(2, 16)), sample, x)


@pytest.mark.parametrize("type", ["Q4_K", "Q6_K", "Q5_0"])
def test_rows_of_x_that_do_not_fit_together_are_multiplied_in_parts(emulated, type):
    sample = make((48, 4096), type, seed=4)
    x, residual = inputs(7, 4096, HALF), inputs(7, 48, HALF, seed=2)
    got = emulated.gemv(TINY, x, [sample.matrix], residual=residual, out=torch.empty(7, 48))
    close(got - residual.float(), sample, x, slack=4 * SUMS)
    wide = make((16, 16_384), type, seed=4)
    with pytest.raises(ValueError, match="gguf_gemv: in = 16384, is too large for the shared memory of this card"):
        emulated.gemv(TINY, inputs(1, 16_384, HALF), [wide.matrix])


@pytest.mark.parametrize("type", TYPES)
def test_the_widest_row_fits_on_every_card(emulated, type):
    sample = make((16, gguf_kernel.WIDEST), type, seed=1)
    x = inputs(1, gguf_kernel.WIDEST, HALF)
    close(emulated.gemv(SMALL, x, [sample.matrix], out=torch.empty(1, 16)), sample, x)


def test_more_tiles_than_one_wave_has_shares_for(emulated):
    sample = make((1600, 256), "Q4_K", seed=2)
    x = inputs(8, 256, HALF)
    close(emulated.gemv(TINY, x, [sample.matrix], out=torch.empty(8, 1600)), sample, x)


@pytest.mark.parametrize("kind", ["plain", "offset"])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_three_matrices_with_norm_bias_and_residual(emulated, dtype, kind):
    outs, columns = (48, 16, 96), 768
    samples = [make((out, columns), "Q4_K", seed=out) for out in outs]
    x, weight = inputs(1, columns, dtype), torch.rand(columns) + 0.5
    norm = gemv.Norm(weight if kind == "offset" else weight.to(dtype), 1e-5)
    bias, residual = torch.randn(160).to(dtype), torch.randn(1, 160).to(dtype)
    got = emulated.gemv(SMALL, x, biased([each.matrix for each in samples], bias.split(outs)), norm=norm,
                        residual=residual, out=torch.empty(1, 160))  # fmt: skip
    dense, size = (torch.cat([of(each) for each in samples]) for of in (lambda each: each.dense, magnitude))
    wide = normed(x, norm).double()
    exact = wide @ dense.T + bias.double() + residual.double()
    slack = 3e-4 if dtype == HALF else 3e-3  # x/rms may round to its other neighbour
    assert ((got - exact).abs() <= slack * (wide.abs() @ size.T) + 1e-6).all()


@pytest.mark.parametrize("type", ["Q4_K", "Q6_K", "Q4_0", "NVFP4"])
@pytest.mark.parametrize("rows", [1, 5])
def test_gate_and_up(emulated, type, rows):
    pair = [make((112, 512), type, seed=seed) for seed in (1, 2)]
    x = inputs(rows, 512, BF16) / 4
    biases = [torch.randn(112).to(BF16) for _ in pair]
    for device in (LARGE, SMALL):
        got = emulated.gemv(device, x, biased([each.matrix for each in pair], biases), activation="silu",
                            out=torch.full((rows, 112), torch.nan))  # fmt: skip
        gate, up = (x.double() @ each.dense.T + bias.double() for each, bias in zip(pair, biases, strict=True))
        torch.testing.assert_close(got.double(), F.silu(gate) * up, rtol=2e-4, atol=2e-4)


def test_each_matrix_has_its_own_factor(emulated):
    outs = (48, 16, 96)
    samples = [make((out, 832), "NVFP4", seed=out) for out in outs]
    samples = [GgufSample(replace(each.packed, factor=factor), replace(each.matrix, factor=factor))
               for each, factor in zip(samples, (0.375, -3.0, 1e-5), strict=True)]  # fmt: skip
    x = inputs(3, 832, BF16)
    got = emulated.gemv(SMALL, x, [each.matrix for each in samples], out=torch.empty(3, 160))
    for part, each in zip(got.split(outs, 1), samples, strict=True):
        close(part, each, x)
    odd = replace(make((16, 256), "Q4_K").matrix, factor=2.0)
    with pytest.raises(ValueError, match="gguf_gemv: factor = 0, is not 1: only NVFP4 has one"):
        emulated.gemv(LARGE, x[:, :256].contiguous(), [odd])
    with pytest.raises(ValueError, match="gguf_dequantize: factor = 0, is not 1: only NVFP4 has one"):
        emulated.dequantize(odd, 0, torch.empty(16, 256))


def test_results_of_16_bit_are_rounded_once_and_neighbours_stay(emulated):
    sample = make((64, 512), "Q5_K")
    x = inputs(3, 512, BF16)
    wide = emulated.gemv(LARGE, x, [sample.matrix], out=torch.empty(3, 64))
    buffer = torch.full((5, 64), torch.nan, dtype=BF16)
    emulated.gemv(LARGE, x, [sample.matrix], out=buffer[1:4])
    assert torch.equal(buffer[1:4], wide.to(BF16))
    assert buffer[[0, 4]].isnan().all()


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_what_is_not_finite_stays_in_its_row(emulated, dtype):
    sample = make((48, 512), "Q4_K")
    x = inputs(5, 512, dtype)
    clean = emulated.gemv(LARGE, x, [sample.matrix])
    x[2, 400], x[4, 70] = torch.inf, torch.nan
    got = emulated.gemv(LARGE, x, [sample.matrix])
    assert torch.equal(bits(got[[0, 1, 3]]), bits(clean[[0, 1, 3]]))
    assert not got[2].isfinite().any()
    assert got[4].isnan().all()


@pytest.mark.parametrize("rows", [1, 4])
def test_columns_in_another_order(emulated, rows):
    """As of gated delta nets, whose value heads GGUF stores in another order."""
    sample = make((48, 512), "Q4_K", seed=11)
    places = torch.randperm(64).to(torch.int16)
    x = inputs(rows, 512, HALF)
    stored = torch.empty_like(x).view(rows, 64, 8)
    stored[:, places.long()] = x.view(rows, 64, 8)
    matrix = replace(sample.matrix, places=places)
    close(emulated.gemv(LARGE, x, [matrix], out=torch.empty(rows, 48)), sample, stored.view(rows, 512))
    other = replace(sample.matrix, places=places.clone())
    with pytest.raises(ValueError, match="gguf_gemv: places = 1, are not those of the first matrix"):
        emulated.gemv(LARGE, x, [matrix, other])
    with pytest.raises(ValueError, match="gguf_gemv: places = 512, cannot be used with a norm"):
        emulated.gemv(LARGE, x[:1], [matrix], norm=gemv.Norm(torch.ones(512, dtype=HALF), 1e-5))


def test_rows_of_zeros(emulated):
    sample = make((16, 256), "Q4_K")
    got = emulated.gemv(LARGE, torch.zeros(2, 256, dtype=HALF), [sample.matrix], out=torch.empty(2, 16))
    assert not got.any()


def test_wrong_tensors_are_named(emulated):
    sample = make((16, 256), "Q4_K")
    x = inputs(1, 256, HALF)
    odd = torch.zeros(16 * 144 + 1, dtype=torch.uint8)[1:].view(16, 144)
    with pytest.raises(ValueError, match="gguf_gemv: blocks = 1, bytes past"):
        emulated.gemv(LARGE, x, [replace(sample.matrix, blocks=odd)])
    with pytest.raises(ValueError, match="gguf_gemv: blocks are Q6_K, those of the first Q4_K"):
        emulated.gemv(LARGE, x, [sample.matrix, make((16, 256), "Q6_K").matrix])
    with pytest.raises(ValueError, match="gguf_gemv: blocks are Q1_0, must be of Q4_0, "):
        emulated.gemv(LARGE, x, [gguf_kernel.GgufOperand(torch.zeros(16, 36, dtype=torch.uint8), "Q1_0")])
    with pytest.raises(ValueError, match=r"gguf_gemv: blocks have shape \(8, 144\), must be whole blocks"):
        emulated.gemv(LARGE, x, [replace(sample.matrix, blocks=sample.matrix.blocks[:8])])
    with pytest.raises(ValueError, match="gguf_gemv: x has 256 columns, a matrix has 512"):
        emulated.gemv(LARGE, x, [make((16, 512), "Q4_K").matrix])
    with pytest.raises(ValueError, match="gguf_dequantize: row_begin = 8, must be a row of the matrix, in whole tiles"):
        emulated.dequantize(sample.matrix, 8, torch.empty(8, 256, dtype=HALF))


@pytest.mark.parametrize("dtype", [HALF, BF16, F32], ids=str)
@pytest.mark.parametrize("type", TYPES)
def test_dequantize_is_the_definition_bit_for_bit(emulated, type, dtype):
    sample = make((48, columns_of(type, 2, 1)), type, seed=7)
    rows, columns = sample.packed.shape
    buffer = torch.full((rows + 2, columns), torch.nan, dtype=dtype)
    out = emulated.dequantize(sample.matrix, 0, buffer[1:-1])
    expected = codec.dequantize(sample.packed, dtype)
    assert torch.equal(bits(out), bits(expected))
    assert buffer[[0, -1]].isnan().all()
    slab = emulated.dequantize(sample.matrix, 16, torch.empty(16, columns, dtype=dtype))
    assert torch.equal(bits(slab), bits(expected[16:32]))


@pytest.mark.parametrize("dtype", [HALF, BF16, F32], ids=str)
def test_every_scale_and_code_of_nvfp4(emulated, dtype):
    """Its scales have no sign, 0x7F of them is 0, and code 8 is +0."""
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 4, 4).repeat_interleave(2, 1)  # [row, block, scale]
    codes = torch.arange(16, dtype=torch.uint8) * 17
    codes = torch.stack((codes[:8], codes[8:]))[torch.arange(8) % 2].repeat(16, 1, 4).view(16, 8, 32)
    packed = codec.Packed(torch.cat((blocks, codes), 2).view(16, -1), "NVFP4")
    sample = GgufSample(packed, gguf_kernel.GgufOperand(tiles.tile(packed.blocks, "NVFP4"), "NVFP4"))
    assert packed.shape == (16, 512)
    out = emulated.dequantize(sample.matrix, 0, torch.empty(16, 512, dtype=dtype))
    assert torch.equal(bits(out), bits(codec.dequantize(packed, dtype)))
    x = inputs(8, 512, HALF)
    close(emulated.gemv(LARGE, x, [sample.matrix], out=torch.empty(8, 16)), sample, x)


def test_every_entry_of_the_grid_of_iq1(emulated):
    index = torch.randperm(2048).view(16, 4, 8, 4)
    low, high = (index & 255).to(torch.uint8).view(16, 4, 32), index >> 8
    words = sum(high[..., i] << 3 * i for i in range(4)) | torch.randint(0, 16, (16, 4, 8)) << 12
    bytes = torch.stack((words & 255, words >> 8), -1).to(torch.uint8).view(16, 4, 16)
    number = torch.full((16, 4, 1), 0.5, dtype=HALF).view(torch.uint8)
    packed = codec.Packed(torch.cat((number, low, bytes), 2).view(16, -1), "IQ1_S")
    matrix = gguf_kernel.GgufOperand(tiles.tile(packed.blocks, "IQ1_S"), "IQ1_S")
    out = emulated.dequantize(matrix, 0, torch.empty(packed.shape))
    assert torch.equal(bits(out), bits(codec.dequantize(packed, F32)))


@pytest.mark.parametrize("type", TYPES)
def test_tiles_can_be_undone_and_take_no_memory(type):
    sample = make((48, columns_of(type, 2)), type, seed=8)
    blocks = sample.packed.blocks.clone()
    tiles.tile_(blocks, type)
    assert torch.equal(blocks, sample.matrix.blocks)
    assert torch.equal(tiles.untile(blocks[16:32], type), sample.packed.blocks[16:32])
    assert not torch.equal(blocks, sample.packed.blocks)
