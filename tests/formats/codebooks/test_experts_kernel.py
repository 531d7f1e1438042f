"""Experts in codebooks on a GPU: near fp64 as tables of f16 let be, the same bits every time, and in a graph.

The kernel's logic on a CPU: test_vq_experts_emulated.py.
"""

from __future__ import annotations

import functools

import pytest
import torch

from localq.formats.codebooks.rotation import packed_signs, rotate
from localq.formats.experts import kernel as expert_kernel
from localq.kernels import gemv
from tests.support.kernels.expert_operands import chosen_of, down, gate_up
from tests.support.kernels.nf4_operands import bits, inputs
from tests.support.kernels.vq_operands import SCHEMES
from tests.support.kernels.vq_stacks import VqExperts, stack_of

pytestmark = pytest.mark.cuda
SHAPES = [(5, 3, 40, 640), (9, 8, 83, 128), (40, 16, 768, 2048), (8, 2, 2064, 4096)]
DTYPES = [torch.float16, torch.bfloat16]
every_shape = pytest.mark.parametrize("number", range(len(SHAPES)))
every_scheme = pytest.mark.parametrize("name", ["s4l16", "s8l8+s8l8", "s4l16+s16l32"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)  # on top: one stack after the other, for both types


@functools.lru_cache(maxsize=1)
def stack(name: str, number: int, parts: int) -> VqExperts:
    """Made in seconds. Of gate and up every second has codebooks that both share."""
    count, _, out, columns = SHAPES[number]
    shared = parts == 2 and number % 2 == 1
    return stack_of((count, out, columns), SCHEMES[name], parts, number, shared=shared, device="cuda")


def near(got: torch.Tensor, exact: torch.Tensor, naive: torch.Tensor) -> None:
    """Entries of tables are rounded to f16, which adds an error like that of weights in 16 bit: four times torch's."""
    error, allowed = (got.double() - exact).abs().max().item(), (naive.double() - exact).abs().max().item()
    assert error <= 4 * allowed + 1e-6 * exact.abs().max().item()


@every_dtype
@every_scheme
@every_shape
def test_gate_and_up(name, number, dtype):
    count, active, width, columns = SHAPES[number]
    of = stack(name, number, 2)
    chosen, _ = chosen_of(count, active, number, "cuda")
    x = inputs(1, columns, dtype, "cuda") / 16
    norm = gemv.Norm(torch.rand(columns, device="cuda").to(dtype) + 0.5, 1e-5) if number % 2 else None
    out = torch.full((active, width), torch.nan, dtype=dtype, device="cuda")
    given = {"norm": norm, "gate": "silu", "interleaved": False, "out": out}
    expert_kernel.experts_gate_up(x, of.stack, None, chosen, **given)
    near(out, *gate_up(x, of.dense, None, chosen, norm, "silu", False))
    again = out.clone()
    expert_kernel.experts_gate_up(x, of.stack, None, chosen, **given)
    assert torch.equal(bits(out), bits(again))


@every_dtype
@every_scheme
@every_shape
def test_down(name, number, dtype):
    count, active, out_features, columns = SHAPES[number]
    of = stack(name, number, 1)
    chosen, weights = chosen_of(count, active, number, "cuda")
    gated = inputs(active, columns, dtype, "cuda") / 16
    residual = torch.randn(1, out_features, device="cuda").to(dtype)
    found = []
    for _ in range(2):
        out = residual.clone()
        expert_kernel.experts_down(gated, of.stack, None, chosen, weights, residual=out, out=out)
        found.append(out)
    near(found[0], *down(gated, of.dense, None, chosen, weights, residual))
    assert torch.equal(bits(found[0]), bits(found[1]))


@every_dtype
@every_shape
def test_down_of_rotated_inputs(number, dtype):
    """Bit for bit as a launch before this one would rotate them."""
    count, active, out_features, columns = SHAPES[number]
    of = stack("s4l16", number, 1)
    chosen, weights = chosen_of(count, active, number, "cuda")
    gated = inputs(active, columns, dtype, "cuda") / 16
    signs = packed_signs(torch.rand(columns, generator=torch.Generator().manual_seed(number)) < 0.5).cuda()
    found = []
    for given, around in ((gated, {"signs": signs}), (rotate(gated, signs), {})):
        out = torch.full((1, out_features), torch.nan, dtype=dtype, device="cuda")
        expert_kernel.experts_down(given, of.stack, None, chosen, weights, residual=None, out=out, **around)
        found.append(out)
    assert torch.equal(bits(found[0]), bits(found[1]))
    assert found[0].isfinite().all()


def test_a_graph_follows_the_indices():
    of = stack_of((6, 48, 256), SCHEMES["s4l16"], 2, 1, device="cuda")
    x, chosen = inputs(1, 256, torch.float16, "cuda"), torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    out = torch.empty(2, 48, dtype=torch.float16, device="cuda")
    plain = {"norm": None, "gate": "silu", "interleaved": False, "out": out}
    expert_kernel.experts_gate_up(x, of.stack, None, chosen, **plain)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expert_kernel.experts_gate_up(x, of.stack, None, chosen, **plain)
    for pair in ([3, 5], [2, 0], [4, 4]):
        chosen.copy_(torch.tensor(pair, dtype=torch.int32))
        graph.replay()
        replayed = out.clone()
        expert_kernel.experts_gate_up(x, of.stack, None, chosen, **plain)
        assert torch.equal(bits(replayed), bits(out))
