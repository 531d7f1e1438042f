"""delta_verify on a GPU, where blocks run at the same time: the bits of delta_decode token by token, and as a graph."""

from __future__ import annotations

import pytest
import torch

from localq.engine.selftest.delta_rows import draw_rows
from localq.kernels import embed
from tests.support.kernels.delta_emulation import HALF
from tests.support.kernels.delta_rows import assert_bits_of_single_steps

pytestmark = pytest.mark.cuda

SHAPES = [(1, 1), (4, 8), (16, 1), (16, 2), (16, 3)]  # key heads, and value heads for each
PLAN = [(4, 3), (8, 1), (2, 2), (1, 1), (8, 8), (8, 8), (4, 1), (1, 1), (3, 2)]  # rows, accepted
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("key_heads", "shared"), SHAPES)
def test_accepted_tokens_have_the_bits_of_single_steps(dtype, key_heads, shared):
    for hidden, seed in ((8, 0), (5120, 1), (6152, 2)):
        assert_bits_of_single_steps(draw_rows(key_heads, shared, dtype, CUDA, seed, hidden), PLAN)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_every_row_gives_what_fp64_gives(dtype, rows):
    case = draw_rows(16, 3, dtype, CUDA, seed=rows, hidden=5120)
    tokens = case.draw(rows, torch.Generator().manual_seed(1))
    expected, _, _ = case.expected(tokens)
    torch.testing.assert_close(case.verify(tokens).double(), expected, rtol=4 * HALF[dtype], atol=4 * HALF[dtype])


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_a_graph_gives_the_bits_of_launches(rows):
    """Steps that begin as those of a model do, with a launch that waits for all before it, and accept all rows."""
    cases = [draw_rows(16, 3, torch.bfloat16, CUDA) for _ in range(2)]
    tokens = cases[0].draw(rows, torch.Generator().manual_seed(3))
    table, id = torch.randn(3, 320, device=CUDA).bfloat16(), torch.ones(rows, dtype=torch.int64, device=CUDA)
    out = [torch.zeros(rows, cases[0].step.token.gates.shape[1], dtype=torch.bfloat16, device=CUDA) for _ in range(2)]

    def step(case, out):
        embed.embed(id, table, out=tokens.x)
        out.copy_(case.verify(tokens))
        case.position += rows

    step(cases[0], out[0])  # kernels load
    step(cases[1], out[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(cases[0], out[0])
    differing = torch.zeros(1, dtype=torch.int64, device=CUDA)
    for _ in range(200):
        graph.replay()
        step(cases[1], out[1])
        differing += (out[0] != out[1]).sum()
    assert int(differing) == 0
    for left, right in zip(cases[0].state, cases[1].state, strict=True):
        assert torch.equal(left, right)
