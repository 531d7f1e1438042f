"""Products of all experts in one launch, compiled for the CPU (vq_machine_on_cpu.cuh), against fp64.

Experts without entries, with one, with a whole tile and with more; ragged rows and columns; every format, gate and
depth of the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from localq.formats.experts import grouped
from tests.support.kernels import expert_operands
from tests.support.kernels.expert_operands import FORMATS, assert_near, experts_of_tokens
from tests.support.kernels.nf4_operands import inputs

LARGE, CONSUMER = (2, 232_448), (2, 101_376)
# Experts, chosen, tokens, width, columns.
SHAPES = [(6, 2, 70, 40, 128), (3, 1, 9, 136, 64), (40, 4, 33, 8, 320)]


def sorted_entries(
    emulated, experts: int, active: int, tokens: int, seed: int
) -> tuple[Tensor, Tensor, grouped.Entries]:
    chosen, weights = experts_of_tokens(experts, active, tokens, seed)
    return chosen, weights, grouped.experts_sort(chosen, experts)


def joined(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    exact, naive = zip(*pairs, strict=True)
    return torch.cat(exact), torch.cat(naive)


def test_entries_are_sorted_by_expert(emulated):
    chosen, _, entries = sorted_entries(emulated, 9, 3, 700, seed=1)
    counts = chosen.flatten().bincount(minlength=9)
    assert entries.ends.tolist() == counts.cumsum(0).tolist()
    assert entries.tile_ends.tolist() == ((counts + 63) // 64).cumsum(0).tolist()
    of_places = chosen.flatten()[entries.places.argsort()]
    assert of_places.tolist() == sorted(chosen.flatten().tolist())
    assert entries.rows[entries.places.long()].tolist() == [token for token in range(700) for _ in range(3)]


def test_experts_that_there_are_not_count_as_the_nearest(emulated):
    entries = grouped.experts_sort(torch.tensor([[-5, 3], [2, 99]]), 4)
    assert entries.ends.tolist() == [1, 1, 2, 4]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", range(len(SHAPES)))
@pytest.mark.parametrize("name", FORMATS)
def test_gate_and_up_of_all_experts(emulated, name, number, dtype):
    experts, active, tokens, width, columns = SHAPES[number]
    operand = FORMATS[name]((experts, 2 * width, columns), dtype, number, "cpu")
    chosen, _, entries = sorted_entries(emulated, experts, active, tokens, number)
    emulated.device = (LARGE, CONSUMER)[number % 2]
    x, interleaved, gate = (
        inputs(tokens, columns, dtype, seed=number) / 16,
        bool(number % 2),
        ("silu", "clamped")[number % 2],
    )
    bias = torch.randn(experts, 2 * width).to(dtype) if number != 2 else None
    out = torch.full((entries.count, width), torch.nan, dtype=dtype)
    how = grouped.Gate(gate, interleaved, expert_operands.ALPHA, expert_operands.LIMIT)
    grouped.experts_gemm(x, operand.stack, bias, entries, gate=how, out=out)
    one = (operand.dense, bias)
    exact, naive = joined(
        expert_operands.gate_up(x[token, None], *one, chosen[token], None, gate, interleaved) for token in range(tokens)
    )
    assert_near(out[entries.places.long()], exact, naive)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", range(len(SHAPES)))
@pytest.mark.parametrize("name", FORMATS)
def test_down_of_all_experts_and_its_sum(emulated, name, number, dtype):
    experts, active, tokens, out_features, columns = SHAPES[number]
    operand = FORMATS[name]((experts, out_features, columns), dtype, number, "cpu")
    chosen, weights, entries = sorted_entries(emulated, experts, active, tokens, number)
    emulated.device = (CONSUMER, LARGE)[number % 2]
    gated = inputs(entries.count, columns, dtype, seed=number) / 16
    bias = torch.randn(experts, out_features).to(dtype) if number == 2 else None
    each = torch.full((entries.count, out_features), torch.nan, dtype=dtype)
    grouped.experts_gemm(gated, operand.stack, bias, entries, gate=None, out=each)
    assert not each.isnan().any()
    y = grouped.experts_sum(each, entries, weights, torch.full((tokens, out_features), torch.nan, dtype=dtype))
    of_token = entries.places.long().view(tokens, active)
    one = (operand.dense, bias)
    exact, naive = joined(
        expert_operands.down(gated[of_token[token]], *one, chosen[token], weights[token], None)
        for token in range(tokens)
    )
    assert_near(y, exact, naive)
    summed = (weights.double()[..., None] * each[of_token].double()).sum(1)
    assert ((y.double() - summed).abs() <= 2**-8 * summed.abs() + 1e-6).all()


def test_a_launch_of_some_experts_leaves_the_others(emulated):
    operand = FORMATS["16 bit"]((5, 24, 72), torch.float16, 3, "cpu")
    _, _, entries = sorted_entries(emulated, 5, 2, 80, seed=4)
    x = inputs(entries.count, 72, torch.float16, seed=2)
    whole, parts = (torch.full((entries.count, 24), torch.nan, dtype=torch.float16) for _ in range(2))
    grouped.experts_gemm(x, operand.stack, None, entries, gate=None, out=whole)
    grouped.experts_gemm(x, operand.stack[1:3], None, entries, gate=None, out=parts, first=1)
    first, _, last = entries.ends[:3].tolist()
    assert parts[first:last].equal(whole[first:last])
    assert parts[:first].isnan().all()
    assert parts[last:].isnan().all()
    grouped.experts_gemm(x, operand.stack[:1], None, entries, gate=None, out=parts)
    grouped.experts_gemm(x, operand.stack[3:], None, entries, gate=None, out=parts, first=3)
    assert parts.equal(whole)


def test_the_result_of_an_entry_depends_on_no_other(emulated):
    operand = FORMATS["nf4"]((4, 32, 128), torch.bfloat16, 3, "cpu")
    chosen, _, entries = sorted_entries(emulated, 4, 2, 100, seed=4)
    x = inputs(100, 128, torch.bfloat16, seed=2)
    all_of = torch.empty(entries.count, 16, dtype=torch.bfloat16)
    grouped.experts_gemm(x, operand.stack, None, entries, gate=grouped.Gate(), out=all_of)
    few = grouped.experts_sort(chosen[40:43], 4)
    some = torch.empty(few.count, 16, dtype=torch.bfloat16)
    grouped.experts_gemm(x[40:43].contiguous(), operand.stack, None, few, gate=grouped.Gate(), out=some)
    assert some[few.places.long()].equal(all_of[entries.places[80:86].long()])


def test_refusals_name_what_is_wrong(emulated):
    operand = FORMATS["16 bit"]((4, 24, 64), torch.float16, 1, "cpu")
    _, _, entries = sorted_entries(emulated, 4, 2, 10, seed=1)
    x, out = torch.zeros(20, 64, dtype=torch.float16), torch.zeros(20, 24, dtype=torch.float16)
    with pytest.raises(ValueError, match="first = 1, 4 experts must be within 4"):
        grouped.experts_gemm(x, operand.stack, None, entries, gate=None, out=out, first=1)
    with pytest.raises(ValueError, match="out = 24, must be a positive multiple of 8, or of 16 with a gate"):
        grouped.experts_gemm(x[:10], operand.stack, None, entries, gate=grouped.Gate(), out=out[:, :12].contiguous())
    with pytest.raises(ValueError, match="gate = 'relu', must be one of"):
        grouped.experts_gemm(x[:10], operand.stack, None, entries, gate=grouped.Gate("relu"), out=out)
    with pytest.raises(ValueError, match="x has 10 rows, must have one for each of 20 entries"):
        grouped.experts_gemm(x[:10], operand.stack, None, entries, gate=None, out=out)
    with pytest.raises(ValueError, match=r"chosen has shape \[4\], must be"):
        grouped.experts_sort(torch.zeros(4, dtype=torch.int64), 4)
    assert all(first <= second for first, second in pairwise(entries.ends.tolist()))
