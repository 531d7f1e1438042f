"""Experts and MXFP4 matrices: launchers and kernels compiled for the CPU (vq_machine_on_cpu.cuh), against fp64.

Every kind of unit, tail and wave that the kernels can meet, without a GPU: a wrong row, column, lane, scale or share is
off by far more than rounding. What only a GPU shows is tested where there is one (test_experts.py).
"""

from __future__ import annotations

import pytest
import torch

from localq import kernels
from localq.formats import mxfp4 as mxfp4_format
from localq.formats.experts import kernel as expert_kernel
from localq.formats.mxfp4 import kernel as mxfp4_kernel
from localq.kernels import gemv
from tests.support.kernels.emulated_experts import NARROW, ROOMY
from tests.support.kernels.expert_operands import FORMATS, assert_near, chosen_of, down, gate_up, mxfp4_matrix
from tests.support.kernels.nf4_operands import assert_as_good_as_naive, bits, inputs
from tests.support.kernels.row_operands import biased

# Experts, chosen, width, columns: parts of units, of steps and of items; more items than warps; one of everything.
SHAPES = [(5, 3, 20, 320), (3, 2, 9, 64), (4, 4, 24, 1088), (2, 1, 8, 3648), (9, 8, 8, 192)]
DTYPES = [torch.float16, torch.bfloat16]


def narrow(name: str, rows: int, columns: int) -> tuple[int, int]:
    """Little shared memory beside the table of NF4, and beside x in MXFP4: the others then read x where it is."""
    beside = 65_600 if "nf4" in name else 64
    if name == "mxfp4":
        beside = 1024 + 768 * rows * -(-columns // 384)
    return NARROW[0], NARROW[1] + beside


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(SHAPES)))
@pytest.mark.parametrize("name", FORMATS)
def test_gate_and_up(emulated, name, number, dtype):
    gate_and_up_are_near(emulated, name, number, dtype, "clamped" if number % 3 else "silu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_gelu_and_up(emulated, name, number, dtype):
    gate_and_up_are_near(emulated, name, number, dtype, expert_kernel.GELU)


def gate_and_up_are_near(emulated, name, number, dtype, gate) -> None:
    count, active, width, columns = SHAPES[number]
    operand = FORMATS[name]((count, 2 * width, columns), dtype, number, "cpu")
    chosen, _ = chosen_of(count, active, number)
    x = inputs(1, columns, dtype, seed=number) / 16
    interleaved = bool(number % 2)
    bias = torch.randn(count, 2 * width).to(dtype) if number % 2 == 0 else None
    norm = gemv.Norm(torch.rand(columns).to(dtype) + 0.5, 1e-5) if number in (0, 3) else None
    emulated.device = narrow(name, 1, columns) if number in (2, 4) else ROOMY
    out = torch.full((active, width), torch.nan, dtype=dtype)
    expert_kernel.experts_gate_up(
        x, operand.stack, bias, chosen, norm=norm, gate=gate, interleaved=interleaved, out=out
    )
    assert_near(out, *gate_up(x, operand.dense, bias, chosen, norm, gate, interleaved))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(SHAPES)))
@pytest.mark.parametrize("name", FORMATS)
def test_down(emulated, name, number, dtype):
    count, active, out_features, columns = SHAPES[number]
    operand = FORMATS[name]((count, out_features, columns), dtype, number, "cpu")
    chosen, weights = chosen_of(count, active, number)
    gated = inputs(active, columns, dtype, seed=number) / 16
    bias = torch.randn(count, out_features).to(dtype) if number % 2 == 0 else None
    residual = torch.randn(1, out_features).to(dtype) if number % 3 else None
    emulated.device = narrow(name, active, columns) if number in (2, 4) else ROOMY
    out = torch.full((1, out_features), torch.nan, dtype=dtype) if residual is None else residual.clone()
    expert_kernel.experts_down(
        gated, operand.stack, bias, chosen, weights, residual=None if residual is None else out, out=out,
        behind_gate_up=bool(number % 2),
    )  # fmt: skip
    assert_near(out, *down(gated, operand.dense, bias, chosen, weights, residual))
    assert emulated.conflicts() == 0


def test_as_many_inputs_as_every_card_has_room_for(emulated):
    emulated.device = (1, 101_376)
    chosen, weights = chosen_of(17, 16, 1)
    for columns, fits in ((3072, True), (3136, False)):
        operand = FORMATS["mxfp4"]((17, 8, columns), torch.bfloat16, 1, "cpu")
        gated, out = inputs(16, columns, torch.bfloat16) / 16, torch.empty(1, 8, dtype=torch.bfloat16)
        assert expert_kernel.has_room(operand.stack, 16) == fits
        given = (gated, operand.stack, None, chosen, weights)
        if fits:
            expert_kernel.experts_down(*given, residual=None, out=out)
            assert_near(out, *down(gated, operand.dense, None, chosen, weights, None))
            continue
        with pytest.raises(ValueError, match="in = 3136, is too large for the shared memory"):
            expert_kernel.experts_down(*given, residual=None, out=out)
    assert expert_kernel.has_room(FORMATS["nf4"]((17, 8, 3136), torch.bfloat16, 1, "cpu").stack, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "16 bit"])
def test_single_columns_of_single_experts_come_out_exactly(emulated, name, dtype):
    """x = a unit vector for one of the experts picks a column of it: a wrong lane or scale cannot hide in a sum."""
    operand = FORMATS[name]((4, 19, 192), dtype, 3, "cpu")
    chosen, weights = torch.tensor([2, 0, 3], dtype=torch.int32), torch.ones(3)
    for column in (0, 1, 4, 6, 11, 31, 32, 63, 127, 128, 166, 191):
        slot = column % 3
        gated = torch.zeros(3, 192, dtype=dtype)
        gated[slot, column] = 1
        out = torch.full((1, 19), torch.nan, dtype=dtype)
        expert_kernel.experts_down(gated, operand.stack, None, chosen, weights, residual=None, out=out)
        assert torch.equal(out[0], operand.dense[chosen[slot], :, column].to(dtype))


def test_indices_that_are_none_are_taken_for_the_nearest(emulated):
    operand = FORMATS["mxfp4"]((3, 16, 64), torch.float16, 1, "cpu")
    x, results = inputs(1, 64, torch.float16), []
    for chosen in ([-5, 7], [0, 2]):
        out = torch.empty(2, 8, dtype=torch.float16)
        indices = torch.tensor(chosen, dtype=torch.int32)
        expert_kernel.experts_gate_up(
            x, operand.stack, None, indices, norm=None, gate="silu", interleaved=True, out=out
        )
        results.append(out)
    assert torch.equal(bits(results[0]), bits(results[1]))


def test_x_of_bf16_over_its_whole_range(emulated):
    """What f16 cannot hold is brought there by a power of two, and small values keep their bits."""
    operand = FORMATS["mxfp4"]((2, 16, 128), torch.bfloat16, 1, "cpu")
    chosen = torch.tensor([1], dtype=torch.int32)
    for size in (1e-30, 1e-6, 1.0, 1e20):
        gated = inputs(1, 128, torch.bfloat16) * size
        gated[0, 7::9] *= 1e-5
        out = torch.empty(1, 16, dtype=torch.bfloat16)
        given = (gated, operand.stack, None, chosen, torch.ones(1))
        expert_kernel.experts_down(*given, residual=None, out=out)
        assert_near(out, *down(gated, operand.dense, None, chosen, torch.ones(1), None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dequantize_is_bit_exact(emulated, dtype):
    for out, columns in ((1, 32), (33, 96), (40, 2080)):
        matrix, _ = mxfp4_matrix(out, columns, out)
        matrix.scales.view(-1)[:] = torch.arange(matrix.scales.numel()).fmod(255).to(torch.uint8)
        expected = mxfp4_format.dequantize(mxfp4_format.Packed(matrix.codes, matrix.scales), dtype)
        got = mxfp4_kernel.mxfp4_dequantize(matrix, dtype, torch.full((out, columns), torch.nan, dtype=dtype))
        assert torch.equal(bits(got), bits(expected))
        first = out // 2
        assert torch.equal(
            bits(mxfp4_kernel.mxfp4_dequantize(matrix, dtype, rows=(first, out - first))), bits(expected[first:])
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_dense_matrices(emulated, rows, dtype):
    """Three matrices with biases and a residual; 1, 2 and up to 4 rows at a time, of 5 only 2 for want of room.

    A row does not depend on the others, whose sizes differ.
    """
    outs, columns = (21, 8, 35), 704
    pairs = [mxfp4_matrix(out, columns, out) for out in outs]
    x = inputs(rows, columns, dtype, seed=rows) / 16 * 2.0 ** -torch.arange(rows)[:, None].to(dtype)
    bias, residual = torch.randn(64).to(dtype), torch.randn(rows, 64).to(dtype)
    operands = biased([matrix for matrix, _ in pairs], bias.split(outs))
    emulated.device = {1: narrow("mxfp4", 1, columns), 5: (1, 22_000)}.get(rows, ROOMY)
    got = mxfp4_kernel.mxfp4_gemv(x, operands, residual=residual)
    dense = torch.cat([weight for _, weight in pairs])
    for row in range(rows):
        assert_as_good_as_naive(got[row : row + 1], x[row : row + 1], dense, bias.float() + residual[row].float())
    assert emulated.conflicts() == 0
    emulated.device = (1, 22_000) if rows == 5 else ROOMY
    alone = mxfp4_kernel.mxfp4_gemv(x[-1:], operands, residual=residual[-1:])
    assert torch.equal(bits(alone), bits(got[-1:]))


def test_rows_too_wide_for_two_at_a_time_go_one_by_one(emulated):
    """27,648 columns, as in models of 32B: a consumer card has room for one row of x. On any card for the widest."""
    matrix, weight = mxfp4_matrix(9, 27_648, 1)
    x, residual = inputs(3, 27_648, torch.bfloat16) / 16, torch.randn(3, 9).bfloat16()
    emulated.device = (1, 101_376)
    got = mxfp4_kernel.mxfp4_gemv(x, [matrix], residual=residual)
    for row in range(3):
        assert_as_good_as_naive(got[row : row + 1], x[row : row + 1], weight, residual[row].float())
    widest, weight = mxfp4_matrix(1, mxfp4_kernel.WIDEST, 2)
    x = inputs(1, mxfp4_kernel.WIDEST, torch.bfloat16) / 16
    assert_as_good_as_naive(mxfp4_kernel.mxfp4_gemv(x, [widest]), x, weight)
    assert mxfp4_kernel.reads(widest)
    wider = mxfp4_kernel.Mxfp4Operand(torch.empty(1, mxfp4_kernel.WIDEST // 2 + 32, dtype=torch.uint8), widest.scales)
    assert not mxfp4_kernel.reads(wider)


@pytest.mark.parametrize("rows", [1, 3])
def test_dense_gate_and_up_in_f32(emulated, rows):
    pairs = [mxfp4_matrix(27, 192, seed) for seed in (1, 2)]
    x, out = inputs(rows, 192, torch.float16) / 32, torch.full((rows, 27), torch.nan)
    mxfp4_kernel.mxfp4_gemv(x, [matrix for matrix, _ in pairs], activation="silu", out=out)
    gate, up = (x.double() @ weight.double().T for _, weight in pairs)
    sizes = [x.double().abs() @ weight.double().abs().T for _, weight in pairs]
    assert ((out - torch.nn.functional.silu(gate) * up).abs() <= 1e-5 * (sizes[0] + 1) * (sizes[1] + 1)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"in_features": 96}, "in = 96"), ({"out_features": 15}, "out = 15"), ({"codes": 8}, "codes = 8, bytes past")],
)
def test_the_launcher_checks_what_it_is_given(emulated, change, message):
    stack = {"format": 0, "codes": 16, "scales": 2, "nested_absmax": 0, "nested_map": 0, "offset": 0.0, "code_map": 0,
             "experts": 3, "out_features": 16, "in_features": 64}  # fmt: skip
    given = {"x": 16, "bias": 0, "chosen": 4, "active": 2, "norm": 0, "norm_weight": 0, "eps": 0.0, "gate": 0}
    more = {"alpha": 0.0, "limit": 0.0, "interleaved": False, "y": 16, "type": 0, "device": 0, "stream": 0}
    with pytest.raises(ValueError, match=message):
        kernels.module().experts_gate_up(stack=stack | change, **given, **more)
