"""Experts and MXFP4: what they refuse; on a GPU, as close to fp64 as 16-bit products are, and the same bits every time.

The kernels' logic on a CPU: test_experts_emulated.py.
"""

from __future__ import annotations

import pytest
import torch

from localq.formats import mxfp4 as mxfp4_format
from localq.formats.experts import kernel as expert_kernel
from localq.formats.experts.stacks import Mxfp4Stack, Nf4Stack
from localq.formats.mxfp4 import kernel as mxfp4_kernel
from localq.formats.mxfp4.kernel import Mxfp4Operand, mxfp4_dequantize, mxfp4_gemv
from localq.kernels import gemv
from tests.support.kernels.expert_operands import (
    FORMATS,
    assert_near,
    chosen_of,
    down,
    gate_up,
    mxfp4_matrix,
    mxfp4_packed,
)
from tests.support.kernels.nf4_operands import bits, inputs
from tests.support.kernels.row_checks import RowProductChecks
from tests.support.kernels.row_operands import RowFormat, RowOperand

HALF, DTYPES = torch.float16, [torch.float16, torch.bfloat16]
X = torch.ones(1, 64, dtype=HALF)
CHOSEN = torch.zeros(2, dtype=torch.int32)
STACK = FORMATS["mxfp4"]((3, 16, 64), HALF, 1, "cpu").stack
NF4 = FORMATS["nf4"]((3, 16, 64), HALF, 1, "cpu").stack
PLAIN = torch.ones(3, 16, 64, dtype=HALF)


def refused(stack=STACK, x=X, bias=None, chosen=CHOSEN, gate="silu", out=None):
    out = torch.empty(2, 8, dtype=HALF) if out is None else out
    expert_kernel.experts_gate_up(x, stack, bias, chosen, norm=None, gate=gate, interleaved=True, out=out)


REFUSED = {
    "x of floats": ({"x": X.float()}, "x is torch.float32"),
    "x of another width": ({"x": X[:, :32].contiguous()}, "x has shape"),
    "no expert": ({"chosen": CHOSEN[:0]}, "0 experts are chosen, must be 1 to 3"),
    "more than there are": ({"chosen": torch.zeros(4, dtype=torch.int32)}, "4 experts are chosen"),
    "indices of 64 bits": ({"chosen": CHOSEN.long()}, "chosen is torch.int64"),
    "a gate that is none": ({"gate": "gelu"}, "gate = 'gelu'"),
    "a bias of one expert": ({"bias": torch.ones(16, dtype=HALF)}, "bias has shape"),
    "out of another size": ({"out": torch.empty(2, 9, dtype=HALF)}, "out has shape"),
    "columns of half a load": (
        {"stack": FORMATS["mxfp4"]((3, 16, 96), HALF, 1, "cpu").stack},
        "a positive multiple of 64",
    ),
    "scales of another stack": ({"stack": Mxfp4Stack(STACK.blocks, STACK.scales[:2])}, "blocks are"),
    "odd rows": ({"stack": FORMATS["mxfp4"]((3, 15, 64), HALF, 1, "cpu").stack}, "out = 15, must be even"),
    "rows that are no experts": ({"stack": Nf4Stack(NF4.matrix, 5)}, "48 rows are not those of 5 experts"),
    "16 bit of another type": ({"stack": PLAIN.bfloat16()}, "stack is torch.bfloat16"),
    "16 bit of two dimensions": ({"stack": PLAIN[0]}, "the stack has shape"),
    "all on the CPU": ({}, "the stack's codes are on cpu, must be on a CUDA device"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_gate_up_refuses_by_name(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        refused(**changes)


def test_a_tiled_matrix_is_refused():
    matrix = FORMATS["nf4"]((3, 16, 64), HALF, 1, "cpu").stack.matrix
    object.__setattr__(matrix, "tiled", True)
    with pytest.raises(ValueError, match="a stack must lie row by row"):
        refused(stack=Nf4Stack(matrix, 3))


def test_route_refuses_by_name():
    given = {"weights": torch.empty(2), "chosen": CHOSEN}
    logits = torch.zeros(1, 8)
    for change, message in (
        ({"how": "softmax"}, "how = 'softmax'"),
        ({"active": 9}, "9 of 8 experts"),
        ({"logits": torch.zeros(1, 513)}, "513 experts"),
        ({"weights": torch.empty(3)}, "weights has shape"),
        ({}, "logits are on cpu, must be on a CUDA device"),
    ):
        asked = {"logits": logits, "active": 2, "how": "softmax_of_all", **given, **change}
        with pytest.raises(ValueError, match=message):
            expert_kernel.route(asked.pop("logits"), asked.pop("active"), **asked)


def test_mxfp4_refuses_by_name():
    matrix, _ = mxfp4_matrix(10, 96, 1)
    with pytest.raises(ValueError, match="in a positive multiple of 64"):
        mxfp4_gemv(torch.ones(1, 96, dtype=HALF), [matrix])
    with pytest.raises(ValueError, match="rows = "):
        mxfp4_dequantize(matrix, HALF, rows=(8, 3))
    with pytest.raises(ValueError, match="scales has shape"):
        mxfp4_dequantize(Mxfp4Operand(matrix.codes, matrix.scales[:9]), HALF)
    with pytest.raises(ValueError, match="expert = 3"):
        expert_kernel.experts_dequantize(STACK, 3, torch.empty(16, 64))


def test_bytes():
    assert expert_kernel.experts_gate_up_bytes(STACK, 2) == 2 * 16 * (32 + 2) + 2 * (64 + 16)
    assert expert_kernel.experts_down_bytes(PLAIN, 2) == 2 * 16 * 128 + 2 * (128 + 16)
    assert NF4.nbytes == 48 * 32 + 48 + 4
    assert mxfp4_kernel.mxfp4_gemv_bytes(1, 64, 32) == 64 * 17 + 2 * 96


def _row_operand(shape, dtype, seed, device):
    packed = mxfp4_packed(*shape, seed, device)
    weight = mxfp4_format.dequantize(packed, torch.float32)
    return RowOperand(Mxfp4Operand(packed.codes, packed.scales), weight)


@pytest.mark.cuda
class TestMxfp4OnTheDevice(RowProductChecks):
    format = RowFormat(_row_operand, mxfp4_gemv, 64)


# Experts, chosen, width, columns. The models' own; parts of units, steps and items; one of everything; many of 16.
SHAPES = [
    (32, 4, 2880, 2880), (8, 8, 768, 2048), (3, 2, 1032, 4096), (5, 3, 20, 320), (3, 2, 9, 64), (4, 4, 24, 1088),
    (2, 1, 8, 3648), (40, 16, 72, 192), (2, 2, 40, 14336),
]  # fmt: skip


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(SHAPES)))
@pytest.mark.parametrize("name", FORMATS)
class TestMixturesOnTheDevice:
    def test_gate_and_up(self, name, number, dtype):
        count, active, width, columns = SHAPES[number]
        operand = FORMATS[name]((count, 2 * width, columns), dtype, number, "cuda")
        chosen, _ = chosen_of(count, active, number, "cuda")
        generator = torch.Generator("cuda").manual_seed(number)
        x = inputs(1, columns, dtype, "cuda", seed=number) / 16
        bias = torch.randn(count, 2 * width, device="cuda", generator=generator).to(dtype) if number % 2 == 0 else None
        factor = torch.rand(columns, device="cuda", generator=generator) + 0.5
        norm = gemv.Norm(factor.to(dtype) if number % 3 else factor, 1e-5) if number % 2 == 0 else None
        for gate, interleaved in (("silu", False), ("clamped", True), (expert_kernel.GELU, False)):
            out = torch.full((active, width), torch.nan, dtype=dtype, device="cuda")
            given = {"norm": norm, "gate": gate, "interleaved": interleaved}
            expert_kernel.experts_gate_up(x, operand.stack, bias, chosen, out=out, **given)
            assert_near(out, *gate_up(x, operand.dense, bias, chosen, norm, gate, interleaved))

    def test_down(self, name, number, dtype):
        count, active, out_features, columns = SHAPES[number]
        operand = FORMATS[name]((count, out_features, columns), dtype, number, "cuda")
        chosen, weights = chosen_of(count, active, number, "cuda")
        generator = torch.Generator("cuda").manual_seed(number)
        gated = inputs(active, columns, dtype, "cuda", seed=number) / 16
        bias = torch.randn(count, out_features, device="cuda", generator=generator).to(dtype) if number % 2 else None
        residual = torch.randn(1, out_features, device="cuda", generator=generator).to(dtype) if number % 3 else None
        out = (
            torch.full((1, out_features), torch.nan, dtype=dtype, device="cuda")
            if residual is None
            else residual.clone()
        )
        given = (gated, operand.stack, bias, chosen, weights)
        expert_kernel.experts_down(*given, residual=None if residual is None else out, out=out)
        assert_near(out, *down(gated, operand.dense, bias, chosen, weights, residual))


def _layer(dtype=torch.bfloat16, experts_of=9, active=4, hidden=576, width=320, shared=False, name="mxfp4"):
    """Router, gate and up, down as a function of x, which it updates; and what it chose.

    shared   the last of the stacks is a shared expert, one more than `experts_of`
    """
    first = FORMATS[name]((experts_of + shared, 2 * width, hidden), dtype, 1, "cuda").stack
    second = FORMATS[name]((experts_of + shared, hidden, width), dtype, 2, "cuda").stack
    generator = torch.Generator("cuda").manual_seed(3)
    weight = torch.randn(experts_of, hidden, device="cuda", generator=generator).to(dtype) / 24
    norm = gemv.Norm(torch.ones(hidden, dtype=dtype, device="cuda"), 1e-5)
    workspace = expert_kernel.router_workspace(experts_of, "cuda")
    shared_gate = torch.randn(1, hidden, device="cuda", generator=generator).to(dtype) / 24 if shared else None
    active_of = active + shared
    weights, gated = torch.empty(active_of, device="cuda"), torch.empty(active_of, width, dtype=dtype, device="cuda")
    chosen = torch.empty(active_of, dtype=torch.int32, device="cuda")

    def run(x, wait=lambda: None):
        how = {"how": "softmax_of_chosen", "weights": weights, "chosen": chosen, "workspace": workspace}
        expert_kernel.router(x, weight, None, active, norm=norm, shared_gate=shared_gate, **how)
        wait()
        expert_kernel.experts_gate_up(x, first, None, chosen, norm=norm, gate="clamped", interleaved=True, out=gated)
        wait()
        expert_kernel.experts_down(gated, second, None, chosen, weights, residual=x, out=x, behind_gate_up=True)
        wait()

    return run, chosen


@pytest.mark.cuda
class TestLayersOnTheDevice:
    @pytest.mark.parametrize("shared", [False, True])
    def test_a_chain_of_layers_reads_what_the_one_before_wrote(self, shared):
        """Launches begin while the ones before still run; what is chosen changes from layer to layer."""
        run, chosen = _layer(shared=shared)
        for seed in range(20):
            x = inputs(1, 576, torch.bfloat16, "cuda", seed=seed)
            chain, apart = x.clone(), x.clone()
            for _ in range(6):
                run(chain)
            last = chosen.tolist()
            for _ in range(6):
                run(apart, torch.cuda.synchronize)
            assert torch.isfinite(chain).all()
            assert torch.equal(bits(chain), bits(apart))
            assert chosen.tolist() == last
            assert len(set(last)) == 4 + shared
            assert not shared or last[-1] == 9

    def test_a_captured_graph_goes_through_the_experts_of_its_input(self):
        run, chosen = _layer()
        stream = torch.zeros(1, 576, dtype=torch.bfloat16, device="cuda")
        run(stream)
        graph, seen = torch.cuda.CUDAGraph(), set()
        with torch.cuda.graph(graph):
            run(stream)
        for seed in range(8):
            x = inputs(1, 576, torch.bfloat16, "cuda", seed=seed)
            expected = x.clone()
            run(expected)
            stream.copy_(x)
            graph.replay()
            assert torch.equal(bits(stream), bits(expected))
            seen.add(tuple(chosen.tolist()))
        assert len(seen) > 1

    @pytest.mark.parametrize("how", expert_kernel.HOW)
    @pytest.mark.parametrize(("count", "active"), [(1, 1), (8, 2), (32, 4), (128, 8), (512, 16)])
    def test_route_is_topk_with_the_lowest_first(self, count, active, how):
        generator = torch.Generator().manual_seed(count)
        for _ in range(10):
            logits = (3 * torch.randn(count, generator=generator)).round()
            weights = torch.full((active,), torch.nan, device="cuda")
            chosen = torch.full((active,), -1, dtype=torch.int32, device="cuda")
            expert_kernel.route(logits[None].cuda(), active, how=how, weights=weights, chosen=chosen)
            order = sorted(range(count), key=lambda expert: (-logits[expert], expert))[:active]
            over = torch.softmax((logits[order] if how == "softmax_of_chosen" else logits).double(), 0)
            expected = over if how == "softmax_of_chosen" else over[order]
            assert chosen.tolist() == order
            torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("count", "active", "columns"), [(7, 1, 72), (33, 3, 4104), (256, 8, 2048), (512, 15, 64)])
    def test_the_router_adds_a_shared_expert(self, count, active, columns, dtype):
        x, weight = inputs(1, columns, dtype, "cuda"), inputs(count, columns, dtype, "cuda", seed=2) / columns**0.5
        gate = inputs(1, columns, dtype, "cuda", seed=3) / columns**0.5
        workspace, found = expert_kernel.router_workspace(count, "cuda"), []
        for shared_gate in (None, gate, gate):
            entries = active + (shared_gate is not None)
            weights = torch.full((entries,), torch.nan, device="cuda")
            chosen = torch.full((entries,), -1, dtype=torch.int32, device="cuda")
            how = {"how": "softmax_of_chosen", "weights": weights, "chosen": chosen, "workspace": workspace}
            expert_kernel.router(x, weight, None, active, norm=None, shared_gate=shared_gate, **how)
            found.append((weights, chosen))
        (alone, without), (weights, chosen), (again, _) = found
        assert torch.equal(bits(weights), bits(again))
        assert torch.equal(bits(weights[:active]), bits(alone))
        assert chosen.tolist() == [*without.tolist(), count]
        exact = torch.sigmoid(x.double() @ gate.double().T)[0]
        assert ((weights[active:] - exact).abs() <= 8 * torch.finfo(dtype).eps).all()
        assert torch.equal(weights[active:], weights[active:].to(dtype).float())

    def test_20_routers_with_one_workspace_choose_the_same(self):
        x = inputs(1, 2880, torch.bfloat16, "cuda")
        weight = inputs(128, 2880, torch.bfloat16, "cuda", seed=2) / 54
        workspace, found = expert_kernel.router_workspace(128, "cuda"), set()
        for _ in range(20):
            weights = torch.empty(4, device="cuda")
            chosen = torch.full((4,), -1, dtype=torch.int32, device="cuda")
            how = {"how": "softmax_of_all", "weights": weights, "chosen": chosen, "workspace": workspace}
            expert_kernel.router(x, weight, None, 4, norm=None, **how)
            found.add((*chosen.tolist(), *weights.tolist()))
        assert len(found) == 1
        logits = workspace[1:].view(torch.float32)
        exact = (x.double() @ weight.double().T)[0]
        assert ((logits - exact).abs() <= 1e-5 * (x.double().abs() @ weight.double().abs().T)[0]).all()
        assert torch.equal(chosen.long(), logits.topk(4).indices)

    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("name", FORMATS)
    def test_20_runs_give_the_same_bits(self, name, shared):
        run, _ = _layer(torch.float16, shared=shared, name=name)
        x, found = inputs(1, 576, torch.float16, "cuda") / 8, []
        for _ in range(20):
            found.append(x.clone())
            run(found[-1])
        assert all(torch.equal(bits(each), bits(found[0])) for each in found)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    def test_dequantize_is_bit_exact(self, dtype):
        for name in FORMATS:
            if name == "16 bit" and dtype == torch.float32:
                continue
            operand = FORMATS[name]((3, 88, 704), dtype, 1, "cuda")
            for expert in range(3):
                out = torch.full((88, 704), torch.nan, dtype=dtype, device="cuda")
                assert expert_kernel.experts_dequantize(operand.stack, expert, out) is out
                assert torch.equal(bits(out), bits(operand.dense[expert].to(dtype)))
        matrix, _ = mxfp4_matrix(1001, 4128, 1, "cuda")
        matrix.scales.view(-1)[:] = torch.arange(matrix.scales.numel(), device="cuda").fmod(255).to(torch.uint8)
        expected = mxfp4_format.dequantize(mxfp4_format.Packed(matrix.codes, matrix.scales), dtype)
        assert torch.equal(bits(mxfp4_dequantize(matrix, dtype)), bits(expected))
        assert torch.equal(bits(mxfp4_dequantize(matrix, dtype, rows=(17, 500))), bits(expected[17:517]))
