"""delta_decode compiled for the CPU (vq_machine_on_cpu.cuh), launcher and kernel, against fp64.

Blocks run one after the other: that the last one of a key head finishes it is tested, in whatever order; that the
others' results are seen by it on a GPU is not.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from localq.engine.selftest import checks, delta_nets
from localq.engine.selftest.compare import Mismatch
from localq.kernels import delta_net
from tests.support.kernels import delta_emulation
from tests.support.kernels.delta_emulation import HALF, Step, assert_token_as_in_fp64

SHAPES = [(1, 1), (2, 1), (2, 3), (1, 8)]  # key heads, and value heads for each
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("library")
    return delta_emulation.library(folder, "delta_on_cpu.cpp", "delta/decode.cu", faults=("delta_decode",))


@pytest.fixture
def emulated(library, monkeypatch):
    """The wrapper runs the kernel on the CPU."""
    delta_emulation.install(
        monkeypatch,
        delta_decode=lambda given, type: library.delta_decode_on_cpu(ctypes.byref(Step(**given)), type),
    )


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("key_heads", "shared"), SHAPES)
@pytest.mark.parametrize(("hidden", "seed"), [(8, 0), (320, 1), (6152, 2)], ids=["narrow", "plain norm", "wide"])
def test_tokens_give_what_fp64_gives(dtype, key_heads, shared, hidden, seed):
    """Columns of fewer words than threads; a norm with weights in 16 bit; more columns than are loaded ahead."""
    case = delta_nets.draw_step(key_heads, shared, dtype, CPU, seed, hidden)
    generator, workspace = torch.Generator().manual_seed(1), case.workspace()
    for _ in range(3):
        assert_token_as_in_fp64(case, workspace, dtype)
        case.draw(generator)


@pytest.mark.usefixtures("emulated")
def test_a_state_of_zeros_and_one_that_nothing_is_kept_of():
    case = delta_nets.draw_step(2, 2, torch.bfloat16, CPU)
    for matrix, rates in ((0.0, -1.0), (1e3, -1e9)):
        case.token.matrix.fill_(matrix)
        case.token.weights.rates.fill_(rates)
        out, _, after = case.expected()
        torch.testing.assert_close(case.run(case.workspace()).double(), out, rtol=2**-6, atol=2**-6)
        torch.testing.assert_close(case.token.matrix.double(), after, rtol=1e-5, atol=2**-6)


@pytest.mark.usefixtures("emulated")
def test_the_same_bits_twice():
    found = []
    for _ in range(2):
        case = delta_nets.draw_step(2, 2, torch.float16, CPU, seed=3)
        found.append((case.run(case.workspace()), case.token.matrix, case.token.columns))
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((16, 48, 128, 128, 4), ""),
        ((16, 32, 128, 128, 4), ""),
        ((4, 36, 128, 128, 4), "36 value heads for 4 key heads"),
        ((3, 4, 128, 128, 4), "4 value heads for 3 key heads"),
        ((4, 4, 64, 128, 4), "64 x 128"),
        ((4, 4, 128, 64, 4), "128 x 64"),
        ((4, 4, 128, 128, 3), "over 3 tokens"),
    ],
)
def test_shapes_without_a_kernel_are_named(shape, why):
    found = delta_net.why_not(*shape)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.usefixtures("emulated")
def test_operands_that_do_not_fit_are_refused_by_name():
    case = delta_nets.draw_step(2, 2, torch.bfloat16, CPU)
    case.token.inputs = case.token.inputs[:, 1:]
    with pytest.raises(ValueError, match="inputs has shape"):
        case.run(case.workspace())
    case = delta_nets.draw_step(2, 2, torch.bfloat16, CPU)
    case.token.matrix = case.token.matrix.double()
    with pytest.raises(ValueError, match=r"matrix is torch\.float64"):
        case.run(case.workspace())
    case = delta_nets.draw_step(2, 2, torch.bfloat16, CPU)
    case.decay = case.decay[:, 8:]
    with pytest.raises(ValueError, match="decay has shape"):
        case.run(case.workspace())
    with pytest.raises(ValueError, match="hidden = 12, must be a multiple of 8"):
        delta_nets.draw_step(2, 2, torch.bfloat16, CPU, hidden=12).run(case.workspace())


@pytest.mark.usefixtures("emulated")
def test_the_self_test_passes_and_sees_a_wrong_result(monkeypatch):
    checks.CHECKS["delta_decode"](CPU)
    right = delta_nets.expected
    monkeypatch.setattr(delta_nets, "expected", lambda case: (right(case)[0] * 1.02, *right(case)[1:]))
    with pytest.raises(Mismatch):
        checks.CHECKS["delta_decode"](CPU)
