"""Experts in GGUF blocks: launchers and kernels compiled for the CPU, every block type, against float64.

A block of another expert, tile or slot is off by far more than rounding. What only a GPU shows is tested where there is
one (test_experts.py).
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from localq import kernels
from localq.files.gguf.block_types import by_name
from localq.formats.experts import kernel as expert_kernel
from localq.formats.gguf import experts_kernel as gguf_experts
from localq.formats.gguf import tiles
from localq.formats.gguf.experts_kernel import GgufStack, gguf_stack
from localq.formats.gguf.kernel import WIDEST
from localq.kernels import gemv
from tests.formats.gguf.test_kernel_emulated import LARGE, SMALL, TINY, TYPES, columns_of, magnitude
from tests.support.kernels.cuda_headers import compile_on_cpu
from tests.support.kernels.expert_operands import chosen_of
from tests.support.kernels.gguf_operands import SOURCES, GgufSample, make
from tests.support.kernels.nf4_operands import inputs
from tests.support.kernels.row_operands import normed

HALF, BF16 = torch.float16, torch.bfloat16
POINTER, LONG, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
SUMS = 3e-6  # of sums in f32, over the sum of magnitudes


class Stack(ctypes.Structure):
    """csrc/gguf/experts.h, GgufStack."""

    _fields_ = (
        ("blocks", POINTER),
        ("factors", POINTER),
        *((name, LONG) for name in ("experts", "parts", "out_features", "in_features")),
    )


class GateUp(ctypes.Structure):
    """GgufExpertsGateUp."""

    _fields_ = (("stack", Stack), ("x", POINTER), ("norm", INT), ("norm_weight", POINTER), ("eps", ctypes.c_float),
                ("chosen", POINTER), ("active", INT), ("activation", INT), ("gates", POINTER),
                ("y", POINTER))  # fmt: skip


class Down(ctypes.Structure):
    """GgufExpertsDown."""

    _fields_ = (("stack", Stack), ("x", POINTER), ("chosen", POINTER), ("weights", POINTER), ("active", INT),
                ("residual", POINTER), ("early", ctypes.c_bool), ("y", POINTER))  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compile_on_cpu(
        tmp_path_factory.mktemp("library"), "gguf_on_cpu.cpp", [f"gguf/{name}.cu" for name in SOURCES],
        faults=("gguf_experts_gate_up", "gguf_experts_down"),
    )  # fmt: skip


@pytest.fixture
def emulated(library, monkeypatch) -> SimpleNamespace:
    """The wrappers run the kernels, on `device` of what this gives."""
    here = SimpleNamespace(device=LARGE)

    def product(name: str, struct: type[ctypes.Structure]):
        def launch(*, stack, type, device, stream, **given):
            of = [given.pop(each) for each in ("block_type", "gate_type", "up_type") if each in given]
            arguments = struct(stack=Stack(**stack), **given)
            getattr(library, f"{name}_on_cpu")(ctypes.byref(arguments), *of, type, *here.device)

        return launch

    module = SimpleNamespace(
        gguf_experts_gate_up=product("gguf_experts_gate_up", GateUp),
        gguf_experts_down=product("gguf_experts_down", Down),
    )
    monkeypatch.setattr(kernels, "module", lambda: module)
    for wrapper in (gguf_experts, expert_kernel):
        monkeypatch.setattr(wrapper, "check_cuda", lambda *given: None)
        monkeypatch.setattr(wrapper, "place", lambda tensor: {"device": 0, "stream": 0})
    return here


def samples_of(experts: int, parts: int, shape: tuple[int, int], type: str, seed: int = 0) -> list[list[GgufSample]]:
    return pairs_of(experts, (type,) * parts, shape, seed)


def pairs_of(experts: int, types: tuple[str, ...], shape: tuple[int, int], seed: int = 0) -> list[list[GgufSample]]:
    """A type for each part."""
    return [[make(shape, type, seed + 10 * expert + part) for part, type in enumerate(types)]
            for expert in range(experts)]  # fmt: skip


def stack_of(samples: list[list[GgufSample]]) -> GgufStack:
    return gguf_stack([[each.matrix for each in some] for some in samples])


def run_gate_up(stack, x, chosen, norm=None, gate="silu") -> torch.Tensor:
    out = torch.full((len(chosen), stack.out_features // 2), torch.nan, dtype=x.dtype)
    gates = torch.full(out.shape, torch.nan) if stack.has_two_types else None
    expert_kernel.experts_gate_up(
        x, stack, None, chosen, norm=norm, gate=gate, interleaved=False, out=out, gates=gates
    )  # fmt: skip
    return out


def run_down(stack, gated, chosen, weights, residual=None, early=False) -> torch.Tensor:
    out = torch.full((1, stack.out_features), torch.nan, dtype=gated.dtype)
    expert_kernel.experts_down(gated, stack, None, chosen, weights, residual=residual, out=out, behind_gate_up=early)
    return out


def near(got: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, slack: float = SUMS) -> None:
    """One rounding to the dtype of the result, and that of sums in f32."""
    assert got.isfinite().all()
    off, eps = (got.double() - exact).abs(), torch.finfo(got.dtype).eps / 2
    assert (off <= eps * exact.abs() + slack * size + 1e-7).all(), float(off.max())


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(("device", "dtype"), [(LARGE, HALF), (SMALL, BF16)], ids=str)
def test_gate_and_up(emulated, type, device, dtype):
    emulated.device = device
    columns = columns_of(type, 2, 1 if by_name(type).values == 256 else 2)
    samples = samples_of(5, 2, (48, columns), type, seed=3)
    x, (chosen, _) = inputs(1, columns, dtype, seed=4) / 16, chosen_of(5, 3, seed=1)
    gate_up_is_near(run_gate_up(stack_of(samples), x, chosen), samples, x, chosen)


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K"), ("Q8_0", "Q8_0"), ("NVFP4", "NVFP4")], ids=str)
def test_gelu_and_up(emulated, types):
    samples = pairs_of(5, types, (48, 768), seed=5)
    x, (chosen, _) = inputs(1, 768, HALF, seed=4) / 16, chosen_of(5, 3, seed=1)
    gelu = functools.partial(F.gelu, approximate="tanh")
    got = run_gate_up(stack_of(samples), x, chosen, gate=expert_kernel.GELU)
    gate_up_is_near(got, samples, x, chosen, gelu)


def gate_up_is_near(got, samples, x, chosen, activate=F.silu) -> None:
    for row, expert in zip(got, chosen.tolist(), strict=True):
        (gate, up), (gates, ups) = (
            [
                x[0].double().abs() @ of(each).T.abs() if absolute else x[0].double() @ of(each).T
                for each in samples[expert]
            ]
            for of, absolute in ((lambda each: each.dense, False), (magnitude, True))
        )
        near(row, activate(gate) * up, gates * up.abs() + (gate.abs() + 1) * ups)


@pytest.mark.parametrize("types", [("Q4_K", "Q6_K"), ("IQ4_XS", "Q8_0"), ("Q5_1", "IQ1_M"), ("NVFP4", "Q2_K")], ids=str)
@pytest.mark.parametrize(("device", "dtype"), [(LARGE, HALF), (SMALL, BF16)], ids=str)
def test_gate_and_up_of_two_types(emulated, types, device, dtype):
    """With and without minimums, tables and blocks of 256 columns, in either order."""
    emulated.device = device
    for both in (types, types[::-1]):
        samples = pairs_of(5, both, (48, 768), seed=4)
        x, (chosen, _) = inputs(1, 768, dtype, seed=4) / 16, chosen_of(5, 3, seed=1)
        stack = stack_of(samples)
        assert stack.types == both
        gate_up_is_near(run_gate_up(stack, x, chosen), samples, x, chosen)


def test_two_types_need_a_buffer(emulated):
    stack, chosen = stack_of(pairs_of(2, ("Q4_K", "Q6_K"), (32, 256))), torch.tensor([1], dtype=torch.int32)
    out = torch.empty(1, 32, dtype=HALF)
    given = {"norm": None, "gate": "silu", "interleaved": False, "out": out}
    for gates, why in ((None, r"gates is None, experts of two block types \(Q4_K, Q6_K\) need them"),
                       (torch.empty(1, 16), r"gates has shape \(1, 16\)")):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            expert_kernel.experts_gate_up(inputs(1, 256, HALF), stack, None, chosen, **given, gates=gates)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(("device", "active", "dtype"), [(LARGE, 3, HALF), (SMALL, 8, BF16)], ids=str)
def test_down(emulated, type, device, active, dtype):
    emulated.device = device
    columns = columns_of(type, 1, 1 if by_name(type).values == 256 else 2)
    samples = samples_of(9, 1, (80, columns), type, seed=5)
    chosen, weights = chosen_of(9, active, seed=2)
    gated = inputs(active, columns, dtype, seed=6) * torch.logspace(-2, 2, active)[:, None].to(dtype)  # scales differ
    residual = inputs(1, 80, dtype, seed=7)
    got = run_down(stack_of(samples), gated, chosen, weights, residual, early=device == LARGE)
    dense, sizes = (
        torch.stack([of(samples[each][0]) for each in chosen.tolist()]) for of in (lambda s: s.dense, magnitude)
    )
    exact = residual.double() + weights.double() @ torch.einsum("koi,ki->ko", dense, gated.double())
    size = residual.double().abs() + weights.double() @ torch.einsum("koi,ki->ko", sizes.abs(), gated.double().abs())
    near(got[0], exact[0], size[0])


@pytest.mark.parametrize("active", [1, 2, 9, 16])
def test_any_number_of_experts(emulated, active):
    samples = samples_of(16, 1, (32, 256), "Q6_K")
    chosen, weights = chosen_of(16, active, seed=active)
    gated = inputs(active, 256, HALF, seed=8)
    got = run_down(stack_of(samples), gated, chosen, weights)
    dense = torch.stack([samples[each][0].dense for each in chosen.tolist()])
    exact = weights.double() @ torch.einsum("koi,ki->ko", dense, gated.double())
    near(got[0], exact, weights.double() @ torch.einsum("koi,ki->ko", dense.abs(), gated.double().abs()))
    pair = samples_of(16, 2, (32, 256), "Q6_K")
    assert run_gate_up(stack_of(pair), gated[:1], chosen).isfinite().all()


def test_norm(emulated):
    samples = samples_of(3, 2, (32, 512), "Q4_K")
    x, weight = inputs(1, 512, HALF, seed=1), torch.rand(512).to(HALF) + 0.5
    norm = gemv.Norm(weight, 1e-5)
    chosen = torch.tensor([2, 0], dtype=torch.int32)
    got = run_gate_up(stack_of(samples), x, chosen, norm)
    wide = normed(x, norm)
    expected = run_gate_up(stack_of(samples), wide, chosen)
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)  # x/rms may round to its other neighbour


def test_an_expert_outside_is_clamped(emulated):
    samples = samples_of(4, 1, (16, 256), "Q4_K")
    gated, weights = inputs(2, 256, HALF), torch.tensor([0.5, 0.5])
    got = run_down(stack_of(samples), gated, torch.tensor([-3, 99], dtype=torch.int32), weights)
    assert torch.equal(got, run_down(stack_of(samples), gated, torch.tensor([0, 3], dtype=torch.int32), weights))


def test_more_tiles_than_one_wave_has_shares_for(emulated):
    emulated.device = TINY
    samples = samples_of(2, 2, (1600, 256), "Q4_K")
    x, chosen = inputs(1, 256, HALF) / 16, torch.tensor([1], dtype=torch.int32)
    gate, up = (x[0].double() @ each.dense.T for each in samples[1])
    torch.testing.assert_close(
        run_gate_up(stack_of(samples), x, chosen)[0].double(), F.silu(gate) * up, rtol=2e-3, atol=2e-3
    )


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("active", [1, 8, 16])
def test_the_widest_inputs_fit_on_every_card(emulated, type, active):
    emulated.device = SMALL
    stack = stack_of(samples_of(1, 1, (16, WIDEST // active), type)[:1] * active)
    assert stack.has_room(active)
    assert not stack.has_room(active + 1)
    gated = inputs(active, WIDEST // active, HALF)
    chosen = torch.zeros(active, dtype=torch.int32)
    assert run_down(stack, gated, chosen, torch.full((active,), 1 / active)).isfinite().all()


def test_wrong_tensors_are_named(emulated):
    sample = make((32, 256), "Q4_K").matrix
    with pytest.raises(ValueError, match="matrices of 1 sizes and experts of 2 kinds, must be of one size, and"):
        gguf_stack([[sample], [make((32, 256), "Q5_K").matrix]])
    with pytest.raises(ValueError, match="gguf_stack: 1 experts, each must have one matrix or two"):
        gguf_stack([[sample, sample, sample]])
    with pytest.raises(ValueError, match="gguf_stack: places must be None"):
        gguf_stack([[replace(sample, places=torch.arange(32, dtype=torch.int16))]])
    with pytest.raises(ValueError, match="gguf_stack: bias must be None"):
        gguf_stack([[replace(sample, bias=torch.zeros(32))]])
    odd = torch.zeros(sample.blocks.numel() + 1, dtype=torch.uint8)[1:].view_as(sample.blocks)
    with pytest.raises(ValueError, match=r"gguf_stack: blocks = [0-9]+, bytes past an aligned address"):
        gguf_stack([[replace(sample, blocks=odd)]])
    pair, chosen = gguf_stack([[sample, sample]]), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="experts in GGUF blocks have no bias"):
        expert_kernel.experts_gate_up(inputs(1, 256, HALF), pair, None, chosen, norm=None, gate="clamped",
                                      interleaved=False, out=torch.empty(1, 32, dtype=HALF))  # fmt: skip
    with pytest.raises(ValueError, match="the stack has 2 matrices of an expert, must be one"):
        run_down(pair, inputs(1, 256, HALF), chosen, torch.ones(1))
    with pytest.raises(ValueError, match=r"x is torch\.float32, must be one of"):
        gguf_experts.check_gguf_stack("experts", pair, torch.float32, torch.device("cpu"))
    assert set(TYPES) == set(tiles.TILED_TYPES)
