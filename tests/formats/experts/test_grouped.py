"""Products of all experts in one launch, on a GPU: as close to fp64 as 16-bit products; the same bits every time."""

from __future__ import annotations

import pytest
import torch

from localq.formats.experts import grouped
from tests.support.kernels import expert_operands
from tests.support.kernels.expert_operands import FORMATS, assert_near, experts_of_tokens
from tests.support.kernels.nf4_operands import inputs

pytestmark = pytest.mark.cuda
# Experts, chosen, tokens, width, columns: of models, and ragged.
SHAPES = [(128, 8, 300, 768, 2048), (32, 4, 1024, 2880, 2880), (7, 2, 200, 40, 192)]


@pytest.mark.parametrize("number", range(len(SHAPES)))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_every_expert(name, dtype, number):
    experts, active, tokens, width, columns = SHAPES[number]
    operand = FORMATS[name]((experts, 2 * width, columns), dtype, number, "cuda")
    chosen, weights = experts_of_tokens(experts, active, tokens, number, "cuda")
    x = inputs(tokens, columns, dtype, "cuda", seed=number) / 16
    entries = grouped.experts_sort(chosen, experts)
    gated, each = (
        torch.full((entries.count, rows), torch.nan, dtype=dtype, device="cuda") for rows in (width, 2 * width)
    )
    gate = grouped.Gate(("silu", "clamped")[number % 2], bool(number % 2), expert_operands.ALPHA, expert_operands.LIMIT)
    of_entries = x[entries.rows.long()].contiguous()
    grouped.experts_gemm(x, operand.stack, None, entries, gate=gate, out=gated)
    grouped.experts_gemm(of_entries, operand.stack, None, entries, gate=None, out=each)
    y = grouped.experts_sum(each, entries, weights, torch.empty(tokens, 2 * width, dtype=dtype, device="cuda"))
    ends, of_gate, exact, naive, places = [0, *entries.ends.tolist()], (gate.name, gate.interleaved), [], [], []
    for expert in range(0, experts, experts // 7):
        some = torch.arange(*ends[expert : expert + 2], device="cuda")
        places.append(some)
        exact.append(of_entries[some].double() @ operand.dense[expert].double().T)
        naive.append(of_entries[some] @ operand.dense[expert].to(dtype).T)
    some, wide, narrow = (torch.cat(part) for part in (places, exact, naive))
    assert_near(each[some], wide, narrow)
    assert_near(gated[some], expert_operands.gated(wide, *of_gate), expert_operands.gated(narrow, *of_gate))
    parts = weights.double()[..., None] * each[entries.places.long().view(tokens, active)].double()
    assert ((y.double() - parts.sum(1)).abs() <= 2**-8 * parts.abs().sum(1) + 1e-6).all()


def test_the_same_bits_every_time_in_a_graph_too():
    experts, active, tokens, width, columns = SHAPES[0]
    operand = FORMATS["nf4"]((experts, 2 * width, columns), torch.float16, 1, "cuda")
    chosen, _ = experts_of_tokens(experts, active, tokens, 1, "cuda")
    x = inputs(tokens, columns, torch.float16, "cuda", seed=1)

    def run() -> torch.Tensor:
        entries = grouped.experts_sort(chosen, experts)
        out = torch.empty(entries.count, width, dtype=torch.float16, device="cuda")
        grouped.experts_gemm(x, operand.stack, None, entries, gate=grouped.Gate(), out=out)
        return out[entries.places.long()]

    first = run()
    for _ in range(20):
        assert run().equal(first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    assert captured.equal(first)
