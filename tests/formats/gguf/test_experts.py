"""Experts in GGUF blocks on a GPU: near fp64, the same bits every time.

The kernel's logic on a CPU: test_experts_emulated.py.
"""

from __future__ import annotations

import pytest
import torch

from localq.formats.experts import kernel as expert_kernel
from localq.formats.gguf import tiles
from localq.kernels import gemv
from tests.support.kernels import gguf_operands
from tests.support.kernels.expert_operands import chosen_of, down, gate_up
from tests.support.kernels.nf4_operands import bits, inputs

pytestmark = pytest.mark.cuda
SHAPES = [(5, 3, 48, 768), (9, 8, 80, 512), (16, 16, 768, 2048), (8, 2, 2064, 4096)]
DTYPES = [torch.float16, torch.bfloat16]
every_shape = pytest.mark.parametrize("number", range(len(SHAPES)))
every_type = pytest.mark.parametrize("type", tiles.TILED_TYPES)


def near(got: torch.Tensor, exact: torch.Tensor, naive: torch.Tensor) -> None:
    """Twice the error of torch with weights in 16 bit: here no weight is rounded."""
    error, allowed = (got.double() - exact).abs().max().item(), (naive.double() - exact).abs().max().item()
    assert error <= 2 * allowed + 1e-6 * exact.abs().max().item()


@every_type
@every_shape
def test_gate_and_up(type, number):
    count, active, width, columns = SHAPES[number]
    dtype = DTYPES[number % 2]
    stack, dense = gguf_operands.experts(count, 2, (width, columns), type, device="cuda")
    chosen, _ = chosen_of(count, active, number, "cuda")
    x = inputs(1, columns, dtype, "cuda") / 16
    norm = gemv.Norm(torch.rand(columns, device="cuda").to(dtype) + 0.5, 1e-5) if number % 2 else None
    out = torch.full((active, width), torch.nan, dtype=dtype, device="cuda")
    given = {"norm": norm, "gate": "silu", "interleaved": False, "out": out}
    expert_kernel.experts_gate_up(x, stack, None, chosen, **given)
    near(out, *gate_up(x, dense, None, chosen, norm, "silu", False))
    again = out.clone()
    expert_kernel.experts_gate_up(x, stack, None, chosen, **given)
    assert torch.equal(bits(out), bits(again))


@every_shape
@pytest.mark.parametrize("up_type", ["Q4_K", "IQ4_XS"])
def test_gelu_and_up(up_type, number):
    count, active, width, columns = SHAPES[number]
    dtype = DTYPES[number % 2]
    stack, dense = gguf_operands.experts(count, 2, (width, columns), "Q4_K", device="cuda", up_type=up_type)
    chosen, _ = chosen_of(count, active, number, "cuda")
    x = inputs(1, columns, dtype, "cuda") / 16
    out = torch.full((active, width), torch.nan, dtype=dtype, device="cuda")
    gates = torch.full(out.shape, torch.nan, device="cuda") if stack.has_two_types else None
    how = {"norm": None, "gate": expert_kernel.GELU, "interleaved": False}
    expert_kernel.experts_gate_up(x, stack, None, chosen, **how, out=out, gates=gates)
    near(out, *gate_up(x, dense, None, chosen, None, expert_kernel.GELU, False))


@every_shape
def test_gate_and_up_of_two_types(number):
    """Two launches, of which the second may begin while the first still runs."""
    count, active, width, columns = SHAPES[number]
    dtype = DTYPES[number % 2]
    stack, dense = gguf_operands.experts(count, 2, (width, columns), "Q4_K", device="cuda", up_type="IQ4_XS")
    chosen, _ = chosen_of(count, active, number, "cuda")
    x = inputs(1, columns, dtype, "cuda") / 16
    out = torch.full((active, width), torch.nan, dtype=dtype, device="cuda")
    gates = torch.full(out.shape, torch.nan, device="cuda")
    given = {"norm": None, "gate": "silu", "interleaved": False, "out": out, "gates": gates}
    expert_kernel.experts_gate_up(x, stack, None, chosen, **given)
    near(out, *gate_up(x, dense, None, chosen, None, "silu", False))
    again = out.clone()
    for _ in range(20):
        gates.fill_(torch.nan)
        expert_kernel.experts_gate_up(x, stack, None, chosen, **given)
        assert torch.equal(bits(out), bits(again))


@every_type
@every_shape
def test_down(type, number):
    count, active, out_features, columns = SHAPES[number]
    dtype = DTYPES[number % 2]
    stack, dense = gguf_operands.experts(count, 1, (out_features, columns), type, device="cuda")
    chosen, weights = chosen_of(count, active, number, "cuda")
    gated, residual = inputs(active, columns, dtype, "cuda"), inputs(1, out_features, dtype, "cuda", seed=2)
    out = residual.clone()
    expert_kernel.experts_down(gated, stack, None, chosen, weights, residual=out, out=out)
    near(out, *down(gated, dense, None, chosen, weights, residual))
    again = residual.clone()
    expert_kernel.experts_down(gated, stack, None, chosen, weights, residual=again, out=again)
    assert torch.equal(bits(out), bits(again))
