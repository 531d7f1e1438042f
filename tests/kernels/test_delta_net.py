"""delta_decode on a GPU, where blocks run at the same time: against fp64, as a graph, and twice the same bits."""

from __future__ import annotations

import pytest
import torch

from localq.engine.selftest import delta_nets

HALF = {torch.float16: 2**-11, torch.bfloat16: 2**-8}  # relative error of a rounding
SHAPES = [(1, 1), (4, 8), (16, 1), (16, 2), (16, 3)]  # key heads, and value heads for each
CUDA = torch.device("cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("key_heads", "shared"), SHAPES)
def test_it_gives_what_fp64_gives(dtype, key_heads, shared):
    case = delta_nets.draw(key_heads, shared, dtype, CUDA)
    workspace = case.workspace()
    for _ in range(5):
        out, columns, matrix = delta_nets.expected(case)
        found = case.run(workspace)
        torch.testing.assert_close(found.double(), out, rtol=4 * HALF[dtype], atol=4 * HALF[dtype])
        torch.testing.assert_close(case.matrix.double(), matrix, rtol=1e-5, atol=4 * HALF[dtype])
        assert torch.equal(case.columns, columns)
        assert not workspace.arrived.any()


@pytest.mark.cuda
def test_a_graph_gives_the_bits_of_launches():
    cases = [delta_nets.draw(16, 3, torch.bfloat16, CUDA) for _ in range(2)]
    workspace, out = cases[0].workspace(), torch.empty_like(cases[0].gates)
    before = cases[0].matrix.clone(), cases[0].columns.clone()
    cases[0].run(workspace, out)  # kernels load
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cases[0].run(workspace, out)
    cases[0].matrix.copy_(before[0])
    cases[0].columns.copy_(before[1])
    for _ in range(200):
        graph.replay()
        expected = cases[1].run(workspace)
        assert torch.equal(out, expected)
    assert torch.equal(cases[0].matrix, cases[1].matrix)
    assert torch.equal(cases[0].columns, cases[1].columns)
