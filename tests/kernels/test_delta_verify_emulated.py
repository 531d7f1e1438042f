"""delta_verify compiled for the CPU (vq_machine_on_cpu.cuh), launcher and kernel: the bits of delta_decode token by
token, whatever is drafted, accepted and rejected, and fp64.

As in test_delta_net_emulated.py, blocks run one after the other, in whatever order.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from localq.engine.selftest import checks
from localq.engine.selftest.compare import Mismatch
from localq.engine.selftest.delta_rows import draw_rows
from localq.kernels import delta_net
from localq.kernels.delta_net import DIM, MOST_ROWS, DeltaWorkspace
from tests.support.kernels import delta_emulation
from tests.support.kernels.delta_emulation import HALF, Rows, Step
from tests.support.kernels.delta_rows import Plain, assert_bits_of_single_steps

SHAPES = [(1, 1), (2, 3), (1, 8)]  # key heads, and value heads for each
CPU = torch.device("cpu")
FAULTS = ("delta_decode", "delta_verify")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    folder, kernels = tmp_path_factory.mktemp("library"), ("delta/decode.cu", "delta/verify.cu")
    return delta_emulation.library(folder, "delta_verify_on_cpu.cpp", *kernels, faults=FAULTS)


@pytest.fixture(autouse=True)
def emulated(library, monkeypatch):
    """The wrappers run the kernels on the CPU."""
    delta_emulation.install(
        monkeypatch,
        delta_decode=lambda given, type: library.delta_decode_on_cpu(ctypes.byref(Step(**given)), type),
        delta_verify=lambda given, type: library.delta_verify_on_cpu(ctypes.byref(Rows(**given)), type),
    )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("key_heads", "shared"), SHAPES)
@pytest.mark.parametrize(("hidden", "seed"), [(8, 0), (320, 1)], ids=["narrow", "plain norm"])
def test_accepted_tokens_have_the_bits_of_single_steps(dtype, key_heads, shared, hidden, seed):
    assert_bits_of_single_steps(
        draw_rows(key_heads, shared, dtype, CPU, seed, hidden), [(4, 3), (8, 1), (2, 2), (1, 1), (3, 2)]
    )


def test_the_longest_draft_behind_the_longest():
    assert_bits_of_single_steps(draw_rows(1, 2, torch.bfloat16, CPU), [(8, 8), (8, 8), (1, 1), (8, 2)])


def test_more_columns_than_a_block_reads_at_once():
    assert_bits_of_single_steps(draw_rows(1, 1, torch.bfloat16, CPU, hidden=6152), [(5, 4), (2, 1)])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_every_row_gives_what_fp64_gives(dtype, rows):
    case = draw_rows(2, 2, dtype, CPU, seed=rows)
    tokens = case.draw(rows, torch.Generator().manual_seed(1))
    expected, _, _ = case.expected(tokens)
    torch.testing.assert_close(case.verify(tokens).double(), expected, rtol=4 * HALF[dtype], atol=4 * HALF[dtype])


@pytest.mark.parametrize("accepted", [-5, 0, 1, 3])
def test_no_more_is_replayed_than_was_accepted_and_is_kept(accepted):
    """Positions before the first drafted token, and behind the last that is kept, replay none and all."""
    case = draw_rows(1, 1, torch.float16, CPU)
    plain, tokens = Plain(case), case.draw(4, torch.Generator().manual_seed(2))
    case.drafted = tuple(part[:3].clone() for part in case.drafted)
    case.verify(tokens)
    for row in range(1 + max(0, min(accepted, 3))):
        plain.out(tokens[row : row + 1])
    case.replay(41 + (accepted if accepted < 3 else 90))
    plain.assert_state_is_equal()


def test_a_replay_of_nothing_changes_nothing():
    case = draw_rows(1, 2, torch.float16, CPU)
    plain = Plain(case)
    case.replay(40)
    plain.assert_state_is_equal()
    assert case.drafted[0].isnan().all()


def test_inputs_are_kept_row_by_row():
    case = draw_rows(2, 2, torch.bfloat16, CPU)
    tokens = case.draw(4, torch.Generator().manual_seed(3))
    case.verify(tokens)
    inputs, decay, beta = case.drafted
    assert torch.equal(inputs[:3], tokens.inputs[1:])
    assert inputs[3:].isnan().all()
    assert (decay[:3] <= 0).all()
    assert ((beta[:3] > 0) & (beta[:3] < 1)).all()
    assert decay[3:].isnan().all()


def test_the_self_test_passes_and_sees_a_wrong_result(monkeypatch):
    check = checks.CHECKS["delta_verify"]
    check(CPU)
    monkeypatch.setattr(delta_net, "delta_replay", lambda *_: None)
    right = delta_net.delta_verify
    for wrong in (lambda *given: right(*given) * 1.02, lambda *given: right(*given[:10], given[10] + 1, *given[11:])):
        monkeypatch.setattr(delta_net, "delta_verify", wrong)
        with pytest.raises(Mismatch):
            check(CPU)


def test_operands_that_do_not_fit_are_refused_by_name():
    case, generator = draw_rows(1, 1, torch.bfloat16, CPU), torch.Generator().manual_seed(4)
    case.workspace = DeltaWorkspace(1, 1, CPU, 9)
    with pytest.raises(ValueError, match="rows = 9, must be from 0 to 8"):
        case.verify(case.draw(9, generator))
    case = draw_rows(1, 1, torch.bfloat16, CPU)
    case.drafted = tuple(part[:2].clone() for part in case.drafted)
    with pytest.raises(ValueError, match="drafted = 2, must be at least rows - 1"):
        case.verify(case.draw(4, generator))
    case = draw_rows(1, 1, torch.bfloat16, CPU)
    tokens = case.draw(2, generator)
    tokens.gates = tokens.gates.contiguous()
    with pytest.raises(ValueError, match="must be alike"):
        case.verify(tokens)
    case = draw_rows(1, 1, torch.bfloat16, CPU)
    case.drafted = (case.drafted[0][:, :DIM], *case.drafted[1:])
    with pytest.raises(ValueError, match="drafted inputs has shape"):
        case.verify(case.draw(MOST_ROWS, generator))
