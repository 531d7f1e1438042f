"""Experts in codebooks: launchers and kernel compiled for the CPU, expert by expert against tables of inner products.

Every kind of stripe, slice, slot and join that the kernel can meet, without a GPU: a code of another expert, row or
slot is off by far more than rounding. What only a GPU shows is tested where there is one (test_vq_experts.py).
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from localq import kernels
from localq.formats.codebooks import experts_kernel as codebook_experts
from localq.formats.codebooks.rotation import packed_signs, rotate
from localq.formats.experts import kernel as expert_kernel
from localq.kernels import gemv
from tests.support.kernels.cuda_headers import compile_on_cpu
from tests.support.kernels.expert_operands import chosen_of
from tests.support.kernels.gemv_structs import Extras, Matrix, Workspace, matrix_of
from tests.support.kernels.nf4_operands import bits, inputs
from tests.support.kernels.row_operands import normed
from tests.support.kernels.vq_operands import SCHEMES, by_tables
from tests.support.kernels.vq_stacks import VqExperts, stack_of

# Multiprocessors, shared memory of a block: of an H200, of a consumer card, and one as small as there can be.
LARGE, SMALL, FEW = (6, 232_448), (4, 101_376), (3, 101_376)
MEETING = 2**18
SUMS = 2e-6  # of at most 288 entries in f32, over the sum of magnitudes
DTYPES = [torch.float16, torch.bfloat16]


class Stack(ctypes.Structure):
    """csrc/lookup/experts.h, VqExperts."""

    _fields_ = (("like", Matrix), ("places", ctypes.c_void_p), ("experts", ctypes.c_int64), ("shared", ctypes.c_bool))


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    found = compile_on_cpu(
        tmp_path_factory.mktemp("library"),
        "vq_experts_on_cpu.cpp",
        ["lookup/experts.cu"],
        launch="vq_launch_on_cpu.h",
        faults=("gate_up", "down"),
    )
    found.bank_conflicts_on_cpu.restype = ctypes.c_int64
    return found


@pytest.fixture
def emulated(library, monkeypatch) -> SimpleNamespace:
    """The wrappers run the kernel, on `device` of what this gives."""
    meeting = torch.full((MEETING,), -1, dtype=torch.int32)
    workspace = Workspace(meeting.data_ptr(), MEETING)
    here = SimpleNamespace(device=LARGE)

    def stack(given):
        like, places, count, shared = given.values()
        return ctypes.byref(Stack(matrix_of(like), places, count, shared))

    def run(name, *given):
        getattr(library, f"{name}_on_cpu")(*given)
        assert (meeting == -1).all(), "not as it was before"
        assert library.bank_conflicts_on_cpu() == 0

    def pointers(*given):
        return [ctypes.c_void_p(each) for each in given]

    def gate_up(*, x, stack: tuple, workspace, chosen, active, norm, norm_weight, eps, y, type, device, stream):
        extras = Extras(norm=norm, norm_weight=norm_weight, eps=eps)
        around = (ctypes.byref(extras), ctypes.byref(place), *pointers(chosen), active, *pointers(x, y), type)
        run("gate_up", of_stack(stack), *around, *here.device)

    def down(*, x, stack, workspace, chosen, weights, active, residual, signs, y, type, device, stream):
        around = (ctypes.byref(place), *pointers(chosen, weights), active, *pointers(x, residual, y), type)
        run("down", of_stack(stack), *pointers(signs), *around, *here.device)

    place, of_stack = workspace, stack
    module = SimpleNamespace(vq_experts_gate_up=gate_up, vq_experts_down=down)
    monkeypatch.setattr(kernels, "module", lambda: module)
    monkeypatch.setattr(codebook_experts, "check_cuda", lambda *given: None)
    monkeypatch.setattr(codebook_experts, "place", lambda tensor: {"device": 0, "stream": 0})
    return here


def halves_of(of: VqExperts, expert: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gate, up and their sizes, f32 [1, w] each."""
    (gate, gates), (up, ups) = (by_tables(each, x) for each in of.operands[expert])
    return gate, up, gates, ups


# Experts, chosen, width, columns: parts of tiles and of tables, one slice and several, one of everything.
SHAPES = [(4, 2, 24, 336), (3, 2, 17, 528), (5, 4, 35, 64), (2, 1, 16, 1040)]
CASES = [
    ("s4l16", 0, SMALL), ("s8l8+s8l8", 0, LARGE), ("s4l16", 1, LARGE), ("s8l8+s8l8", 2, FEW), ("s4l16", 3, SMALL),
    ("s4l16+s16l32", 2, LARGE),
]  # fmt: skip


@pytest.mark.parametrize(("name", "number", "device"), CASES, ids=str)
def test_gate_and_up(emulated, name, number, device):
    count, active, width, columns = SHAPES[number]
    dtype, shared = DTYPES[number % 2], device == SMALL
    of = stack_of((count, width, columns), SCHEMES[name], 2, number, shared=shared, scales=dtype)
    assert of.stack.shared == shared
    emulated.device = device
    chosen, _ = chosen_of(count, active, number)
    x = inputs(1, columns, dtype, seed=number) / 16
    norm = gemv.Norm(torch.rand(columns).to(dtype) + 0.5, 1e-5) if number == 0 else None
    out = torch.full((active, width), torch.nan, dtype=dtype)
    expert_kernel.experts_gate_up(x, of.stack, None, chosen, norm=norm, gate="silu", interleaved=False, out=out)
    wide = x if norm is None else normed(x, norm)
    close = (3e-4 if norm else SUMS) * 1.0  # x/rms may round to its other neighbour
    for got, expert in zip(out.float(), chosen.tolist(), strict=True):
        gate, up, gates, ups = halves_of(of, expert, wide)
        slope = 1.1 * gates * up.abs() + (gate.abs() + close * gates) * ups  # silu is nowhere steeper than 1.1
        expected = torch.nn.functional.silu(gate) * up
        allowed = close * slope + torch.finfo(dtype).eps * expected.abs() + 1e-7
        assert ((got - expected).abs() <= allowed).all(), float(((got - expected).abs() / allowed).max())


@pytest.mark.parametrize(("name", "number", "device"), CASES, ids=str)
def test_down(emulated, name, number, device):
    count, active, out_features, columns = SHAPES[number]
    if active > device[0]:
        device = (active, device[1])
    dtype = DTYPES[number % 2]
    of = stack_of((count, out_features, columns), SCHEMES[name], 1, number, scales=dtype)
    emulated.device = device
    chosen, weights = chosen_of(count, active, number)
    gated = inputs(active, columns, dtype, seed=number) / 16
    gated[-1] *= 2.0**-9  # rows of x have powers of two of their own
    residual = torch.randn(1, out_features).to(dtype) if number % 3 else None
    out = torch.full((1, out_features), torch.nan, dtype=dtype) if residual is None else residual.clone()
    expert_kernel.experts_down(
        gated, of.stack, None, chosen, weights, residual=None if residual is None else out, out=out
    )
    expected, size = torch.zeros(2, 1, out_features)
    for slot, expert in enumerate(chosen.tolist()):
        part, magnitude = by_tables(of.operands[expert][0], gated[slot : slot + 1])
        expected, size = expected + weights[slot] * part, size + weights[slot] * magnitude
    if residual is not None:
        expected, size = expected + residual.float(), size + residual.float().abs()
    allowed = SUMS * size + torch.finfo(dtype).eps * expected.abs() + 1e-7
    assert ((out.float() - expected).abs() <= allowed).all(), float(((out.float() - expected).abs() / allowed).max())


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_down_of_rotated_inputs(emulated, number):
    """Those of every expert, by the signs that all share: bit for bit as by a launch before this one."""
    count, active, out_features, columns = SHAPES[number]
    dtype = DTYPES[number % 2]
    of = stack_of((count, out_features, columns), SCHEMES["s4l16"], 1, number, scales=dtype)
    emulated.device = (7 * active, SMALL[1])
    chosen, weights = chosen_of(count, active, number)
    gated = inputs(active, columns, dtype, seed=number) / 16
    signs = packed_signs(torch.rand(columns, generator=torch.Generator().manual_seed(number)) < 0.5)
    found = []
    for given, around in ((gated, {"signs": signs}), (rotate(gated, signs), {})):
        out = torch.full((1, out_features), torch.nan, dtype=dtype)
        expert_kernel.experts_down(given, of.stack, None, chosen, weights, residual=None, out=out, **around)
        found.append(out)
    assert torch.equal(bits(found[0]), bits(found[1]))
    assert found[0].isfinite().all()


def test_indices_that_are_none_are_taken_for_the_nearest(emulated):
    of = stack_of((3, 16, 64), SCHEMES["s4l16"], 2, 1)
    x, results = inputs(1, 64, torch.float16), []
    for chosen in ([-5, 7], [0, 2]):
        out, indices = torch.empty(2, 16, dtype=torch.float16), torch.tensor(chosen, dtype=torch.int32)
        expert_kernel.experts_gate_up(x, of.stack, None, indices, norm=None, gate="silu", interleaved=False, out=out)
        results.append(out)
    assert torch.equal(bits(results[0]), bits(results[1]))


def test_what_is_not_finite_reaches_no_other_slot(emulated):
    of = stack_of((3, 24, 128), SCHEMES["s4l16"], 1, 2)
    gated, chosen, weights = inputs(2, 128, torch.float16), torch.tensor([2, 0], dtype=torch.int32), torch.ones(2)
    gated[1, 3] = torch.inf
    out = torch.empty(1, 24, dtype=torch.float16)
    expert_kernel.experts_down(gated, of.stack, None, chosen, weights, residual=None, out=out)
    assert out.isnan().all()
    expert_kernel.experts_down(gated[:1], of.stack, None, chosen[:1], weights[:1], residual=None, out=out)
    assert out.isfinite().all()


def test_wrong_operands_are_named(emulated):
    of, one = stack_of((3, 16, 64), SCHEMES["s4l16"], 2, 1), stack_of((3, 16, 64), SCHEMES["s4l16"], 1, 1)
    x, chosen = inputs(1, 64, torch.float16), torch.tensor([1, 0], dtype=torch.int32)
    out = torch.empty(2, 16, dtype=torch.float16)
    plain = {"norm": None, "gate": "silu", "interleaved": False}
    for changed, said in (({"gate": "clamped"}, "silu"), ({"interleaved": True}, "before the ups")):
        with pytest.raises(ValueError, match=said):
            expert_kernel.experts_gate_up(x, of.stack, None, chosen, out=out, **{**plain, **changed})
    with pytest.raises(ValueError, match="1 matrix of an expert, must be gate and up"):
        expert_kernel.experts_gate_up(x, one.stack, None, chosen, out=out.view(-1)[:16].view(2, 8).clone(), **plain)
    with pytest.raises(ValueError, match="must be 1 to 3"):
        expert_kernel.experts_gate_up(x, of.stack, None, torch.zeros(4, dtype=torch.int32), out=out, **plain)
    with pytest.raises(ValueError, match="of 2 kinds"):
        codebook_experts.vq_stack([each for pair in (of.stack, stack_of((2, 16, 128), SCHEMES["s4l16"], 2, 1).stack)
                             for each in pair.matrices])  # fmt: skip
    emulated.device = FEW
    wide = stack_of((9, 16, 64), SCHEMES["s4l16"], 1, 1)
    with pytest.raises(ValueError, match="too many experts, for this device"):
        expert_kernel.experts_down(inputs(8, 64, torch.float16), wide.stack, None, *chosen_of(9, 8, 1), residual=None,
                             out=torch.empty(1, 16, dtype=torch.float16))  # fmt: skip


def test_a_stack_refuses_what_its_kernel_would_misread():
    """A launch is told addresses of all experts by a table, and checks none of them."""
    pair = [list(each) for each in stack_of((2, 24, 64), SCHEMES["s4l16"], 2, 1).stack.matrices]
    good = pair[1][1]
    (book,) = good.books
    shifted = torch.zeros(book.codes.numel() + 1, dtype=torch.uint8)[1:]
    wrong = (
        ("codes", shifted, "codes = 1, bytes past"), ("codes", book.codes[:-16], "codes has shape"),
        ("fragments", book.fragments.float(), "fragments is torch.float32"),
    )  # fmt: skip
    for name, value, said in wrong:
        pair[1][1] = replace(good, books=(replace(book, **{name: value}),))
        with pytest.raises(ValueError, match=f"vq_stack: {said}"):
            codebook_experts.vq_stack(pair)
    pair[1][1] = replace(good, scales=good.scales[:23])
    with pytest.raises(ValueError, match="vq_stack: scales has shape"):
        codebook_experts.vq_stack(pair)
