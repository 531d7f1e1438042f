"""int4_gemv and int4_dequantize compiled for the CPU (vq_machine_on_cpu.cuh): indices, barriers, shares.

Every kind of group, tile, chunk and order that the kernels can meet, without a GPU. Products with unit vectors pick
single weights, which come out exactly: a wrong nibble, lane or scale cannot hide in a sum.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from localq.formats.int4 import codec as int4_codec
from localq.formats.int4 import kernel as int4_kernel
from localq.kernels import gemv
from tests.support.kernels import emulated_products
from tests.support.kernels.cuda_headers import compile_on_cpu
from tests.support.kernels.int4_operands import Int4Sample, make
from tests.support.kernels.nf4_operands import bits, inputs
from tests.support.kernels.row_operands import biased, normed

KERNELS = ("int4/gemv.cu", "int4/dequantize.cu")
HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Multiprocessors, shared memory of a block: of an H200; of a consumer card; too little for x, or for many tiles.
LARGE, SMALL, TINY = (3, 232_448), (2, 101_376), (1, 12_000)
SUMS = 1e-5  # of sums in f32, over the sum of magnitudes


class Matrix(ctypes.Structure):
    """csrc/int4/int4.h, Int4."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "order")),
        *((name, ctypes.c_int64) for name in ("out", "columns", "group")),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compile_on_cpu(
        tmp_path_factory.mktemp("library"), "int4_on_cpu.cpp", KERNELS, faults=("int4_gemv", "int4_dequantize")
    )


@pytest.fixture
def emulated(library, monkeypatch):
    """The wrappers of `formats.int4.kernel` over the kernels on a CPU; `gemv` takes the device first."""
    return emulated_products.install(
        monkeypatch, library, int4_kernel, Matrix, name="int4", stored="stored", device=LARGE
    )


def close(got: torch.Tensor, operand: Int4Sample, x: torch.Tensor, slack: float = SUMS) -> None:
    """f32 results against fp64 with weights that are not rounded to 16 bit: within the rounding of sums."""
    weight = unrounded(operand)
    exact, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    assert ((got.double() - exact).abs() <= slack * size + 1e-30).all(), float(((got - exact).abs() / size).max())


def unrounded(operand: Int4Sample) -> torch.Tensor:
    """f64 [out, in]: (code - zero) * scale."""
    wide = replace(operand.packed, scales=operand.packed.scales.double())
    return int4_codec.dequantize(wide, torch.float64)


# Group, [out, in], what else: groups within blocks, of blocks, of several; a last chunk of 1, 2 and 5 blocks; one group
# for a row, and a last one that is short (GPTQ); columns in the order of their groups.
CASES = {
    "groups of 32": (32, (48, 576), {}),
    "groups of 64": (64, (80, 832), {}),
    "groups of 128": (128, (112, 640), {}),
    "groups of 256": (256, (32, 1280), {}),
    "one group": (576, (48, 576), {}),
    "one group of 128s": (1152, (16, 1152), {}),
    "a short last group": (128, (64, 576), {}),
    "one block": (64, (16, 64), {}),
    "bf16 scales": (128, (48, 640), {"scales": BF16}),
    "act-order": (128, (48, 640), {"act_order": True}),
    "act-order of 32s": (32, (48, 320), {"act_order": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_multiplies_every_weight_once(emulated, case):
    group, shape, kind = CASES[case]
    operand = make(shape, group, seed=shape[0], **kind)
    for device, rows, dtype in ((LARGE, 1, HALF), (SMALL, 7, BF16)):
        x = inputs(rows, shape[1], dtype, seed=rows)
        close(emulated.gemv(device, x, [operand.matrix], out=torch.full((rows, shape[0]), torch.nan)), operand, x)


@pytest.mark.parametrize(("group", "columns"), [(96, 576), (224, 1344), (448, 1600)])
def test_groups_of_any_multiple_of_32(emulated, group, columns):
    """3 and 7 of what the kernel adds up at once to one; the last group may be short."""
    operand = make((32, columns), group, seed=group)
    x = inputs(2, columns, HALF)
    close(emulated.gemv(LARGE, x, [operand.matrix], out=torch.empty(2, 32)), operand, x)


@pytest.mark.parametrize(("group", "dtype"), [(32, HALF), (64, BF16), (128, HALF)], ids=str)
def test_single_columns_come_out_exactly(emulated, group, dtype):
    operand = make((16, 128), group, seed=9, act_order=group == 64)
    weight = unrounded(operand).float()  # a difference of 5 bits times 11 bits: exact
    for first in range(0, 128, 8):  # of both blocks, every place of a word
        x = torch.eye(128, dtype=dtype)[first : first + 8]
        got = emulated.gemv(LARGE, x, [operand.matrix], out=torch.empty(8, 16))
        assert torch.equal(got, weight[:, first : first + 8].T)


@pytest.mark.parametrize("rows", [1, 2])
def test_x_is_read_where_it_is_when_it_does_not_fit(emulated, rows):
    operand = make((48, 5824), 64, seed=4)  # a last chunk of 3 blocks
    x = inputs(rows, 5824, HALF)
    close(emulated.gemv(TINY, x, [operand.matrix], out=torch.empty(rows, 48)), operand, x)
    ordered = make((48, 5824), 64, seed=4, act_order=True)
    with pytest.raises(ValueError, match="in = 5824, is too large for an order of columns"):
        emulated.gemv(TINY, x, [ordered.matrix])
    if rows == 1:
        norm = gemv.Norm(torch.ones(5824, dtype=HALF), 1e-5)
        with pytest.raises(ValueError, match="in = 5824, is too large for a norm"):
            emulated.gemv(TINY, x, [operand.matrix], norm=norm)


def test_shares_leave_room_for_x_that_must_be_in_shared_memory(emulated):
    """24 tiles would have room for their shares, but not beside x: fewer at a time."""
    device, x = (1, 3_000), inputs(1, 640, HALF)
    plain, ordered = (make((384, 640), 64, seed=6, act_order=ordered) for ordered in (False, True))
    close(emulated.gemv(device, x, [ordered.matrix], out=torch.empty(1, 384)), ordered, x)
    norm = gemv.Norm(torch.ones(640, dtype=HALF), 1e-5)
    got = emulated.gemv(device, x, [plain.matrix], norm=norm, out=torch.empty(1, 384))
    assert torch.equal(got, emulated.gemv(LARGE, x, [plain.matrix], norm=norm, out=torch.empty(1, 384)))


def test_the_widest_order_fits_on_every_card(emulated):
    widest = make((16, int4_kernel.WIDEST_ORDER), 128, seed=1, act_order=True)
    x = inputs(1, int4_kernel.WIDEST_ORDER, HALF)
    close(emulated.gemv(SMALL, x, [widest.matrix], out=torch.empty(1, 16)), widest, x)


def test_more_tiles_than_shared_memory_has_shares_for(emulated):
    operand = make((1600, 64), 64, seed=2)
    x = inputs(8, 64, HALF)
    close(emulated.gemv(TINY, x, [operand.matrix], out=torch.empty(8, 1600)), operand, x)


@pytest.mark.parametrize("kind", ["plain", "offset"])
@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act-order"])
def test_three_matrices_with_norm_bias_and_residual(emulated, act_order, kind):
    outs, columns = (48, 16, 96), 640
    operands = [make((out, columns), 128, seed=out, act_order=act_order) for out in outs]
    if act_order:  # as checkpoints have them: what reads one x has one order
        order = operands[0].packed.order
        operands = [Int4Sample(replace(each.packed, order=order), replace(each.matrix, order=order))
                    for each in operands]  # fmt: skip
    x, weight = inputs(1, columns, HALF), torch.rand(columns) + 0.5
    norm = gemv.Norm(weight if kind == "offset" else weight.half(), 1e-5)
    bias, residual = torch.randn(160).half(), torch.randn(1, 160).half()
    got = emulated.gemv(SMALL, x, biased([each.matrix for each in operands], bias.split(outs)), norm=norm,
                        residual=residual, out=torch.empty(1, 160))  # fmt: skip
    dense = torch.cat([unrounded(each) for each in operands])
    wide = normed(x, norm).double()
    exact, size = wide @ dense.T + bias.double() + residual.double(), wide.abs() @ dense.abs().T
    assert ((got - exact).abs() <= 3e-4 * size + 1e-6).all()  # x/rms may round to its other neighbour


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_gate_and_up(emulated, rows, dtype):
    pair = [make((112, 576), 64, seed=seed) for seed in (1, 2)]
    x = inputs(rows, 576, dtype) / 4
    biases = [torch.randn(112).to(dtype) for _ in pair]
    for device in (LARGE, SMALL):
        got = emulated.gemv(device, x, biased([each.matrix for each in pair], biases), activation="silu",
                            out=torch.full((rows, 112), torch.nan))  # fmt: skip
        gate, up = (x.double() @ unrounded(each).T + bias.double() for each, bias in zip(pair, biases, strict=True))
        torch.testing.assert_close(got.double(), F.silu(gate) * up, rtol=2e-5, atol=2e-5)


def test_results_of_16_bit_are_rounded_once_and_neighbours_stay(emulated):
    operand = make((64, 320), 64)
    x = inputs(3, 320, BF16)
    wide = emulated.gemv(LARGE, x, [operand.matrix], out=torch.empty(3, 64))
    buffer = torch.full((5, 64), torch.nan, dtype=BF16)
    emulated.gemv(LARGE, x, [operand.matrix], out=buffer[1:4])
    assert torch.equal(buffer[1:4], wide.to(BF16))
    assert buffer[[0, 4]].isnan().all()


def test_what_is_not_finite_stays_in_its_row_and_has_the_right_sign(emulated):
    operand = make((48, 832), 64)  # a last chunk of 5 blocks
    x = inputs(5, 832, HALF)
    clean = emulated.gemv(LARGE, x, [operand.matrix])
    x[2, 830], x[4, 70] = torch.inf, torch.nan
    got = emulated.gemv(LARGE, x, [operand.matrix])
    assert torch.equal(bits(got[[0, 1, 3]]), bits(clean[[0, 1, 3]]))
    expected = torch.inf * operand.dense[:, 830]  # inf * 0 is NaN
    assert torch.equal(got[2].float().nan_to_num(0.5), expected.half().float().nan_to_num(0.5))
    assert got[4].isnan().all()


def test_unaligned_tensors_and_wrong_numbers_are_named(emulated):
    operand = make((16, 64), 64)
    x = inputs(1, 64, HALF)
    odd = torch.zeros(16 * 32 + 1, dtype=torch.uint8)[1:].view(16, 32)
    with pytest.raises(ValueError, match="int4_gemv: codes = 1, bytes past"):
        emulated.gemv(LARGE, x, [replace(operand.matrix, codes=odd)])
    other = make((16, 64), 32)
    with pytest.raises(ValueError, match="int4_gemv: group = 32, must be that of the first matrix"):
        emulated.gemv(LARGE, x, [operand.matrix, other.matrix])
    ordered = make((16, 64), 64, act_order=True)
    with pytest.raises(ValueError, match="int4_gemv: order = 1, is not that of the first matrix"):
        emulated.gemv(LARGE, x, [operand.matrix, ordered.matrix])
    with pytest.raises(ValueError, match="int4_dequantize: row_begin = 8, must be a row of the matrix, in whole tiles"):
        emulated.dequantize(operand.matrix, 8, torch.empty(8, 64, dtype=HALF))


@pytest.mark.parametrize(
    ("case", "scales"),
    [*((case, HALF) for case in CASES), ("groups of 32", BF16), ("groups of 32", F32), ("a short last group", BF16)],
    ids=str,
)
def test_dequantize_is_the_definition_bit_for_bit(emulated, case, scales):
    group, shape, _ = CASES[case]
    operand = make(shape, group, seed=7, scales=scales)
    for dtype in (HALF, BF16, F32):
        buffer = torch.full((shape[0] + 2, shape[1]), torch.nan, dtype=dtype)
        out = emulated.dequantize(operand.matrix, 0, buffer[1:-1])
        assert torch.equal(bits(out), bits(int4_codec.dequantize(operand.packed, dtype)))
        assert buffer[[0, -1]].isnan().all()


@pytest.mark.parametrize("group", [16, 128])
def test_slabs_of_dequantize(emulated, group):
    operand = make((112, 640), group, seed=8, scales=BF16)
    expected = int4_codec.dequantize(operand.packed, HALF)
    for first, count in ((16, 16), (32, 80), (96, 16)):
        got = emulated.dequantize(operand.matrix, first, torch.empty(count, 640, dtype=HALF))
        assert torch.equal(bits(got), bits(expected[first : first + count]))
