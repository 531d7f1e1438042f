"""delta_prefill compiled for the CPU (vq_machine_on_cpu.cuh), launcher and kernels, against fp64 token by token.

Asynchronous copies arrive when they are waited for, and their place holds NaN until then. The workspace and all
operands end where memory ends (`guarded_memory`).
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from localq.engine.selftest import checks, delta_nets
from localq.engine.selftest.compare import Mismatch
from localq.files import delta_memory
from tests.support.kernels import delta_emulation
from tests.support.kernels.delta_emulation import HALF, INT, POINTER, Net
from tests.support.kernels.guarded_memory import guarded

CPU = torch.device("cpu")
LENGTHS = [2, 63, 64, 65, 130]


class Pass(Net):
    """`DeltaPass` of csrc/delta/delta.h."""

    _fields_ = (
        *((name, POINTER) for name in ("write", "decay", "workspace")), *((name, INT) for name in ("tokens", "chunks")),
    )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("library")
    faults = ("delta_prefill",)
    found = delta_emulation.library(folder, "delta_prefill_on_cpu.cpp", "delta/prefill.cu", faults=faults)
    found.delta_chunk_bytes_on_cpu.restype = ctypes.c_int64
    return found


@pytest.fixture
def counts(library, monkeypatch):
    """The wrapper runs the kernels on the CPU, and counts loads of matrices, and conflicts of banks, here."""
    counts = (ctypes.c_int64 * 4)()
    delta_emulation.install(
        monkeypatch,
        delta_prefill=lambda given, type: library.delta_prefill_on_cpu(ctypes.byref(Pass(**given)), type, counts),
    )
    return counts


def _compare(case, dtype):
    """Run `case`, and compare all that it gives with fp64."""
    out, columns, matrix = delta_nets.expected(case)
    chunks = -(-case.inputs.shape[0] // delta_memory.CHUNK)
    shared = case.weights.value_heads // case.weights.key_heads
    size = chunks * delta_memory.chunk_bytes(case.weights.key_heads, shared)
    found = case.prefill(guarded(torch.full((size,), 0xFF, dtype=torch.uint8)), guarded(torch.zeros_like(case.gates)))
    assert torch.equal(case.columns, columns), "columns"
    torch.testing.assert_close(case.matrix.double(), matrix, rtol=1e-4, atol=4 * HALF[dtype], msg=_named("state"))
    torch.testing.assert_close(found.double(), out, rtol=4 * HALF[dtype], atol=4 * HALF[dtype], msg=_named("out"))
    return found, out, matrix


def _named(what):
    return lambda text: f"{what}: {text}"


def _draw(dtype, tokens, key_heads=1, shared=1, seed=0, rates=1.0, write=None):
    """A case whose operands end where memory ends, with decays `rates` times as strong, and b `write` for all."""
    case = delta_nets.draw(key_heads, shared, dtype, CPU, seed, tokens)
    case.weights.rates.mul_(rates)
    if write is not None:
        case.write.fill_(write)
    names = ("inputs", "gates", "write", "decay", "columns", "matrix")
    return replace(case, **{name: guarded(getattr(case, name)) for name in names})


@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_pass_gives_what_fp64_gives(dtype, tokens):
    _compare(_draw(dtype, tokens), dtype)


@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rates", [0.0, 1e-3, 1.0, 50.0, 1e9])
@pytest.mark.parametrize("write", [-12.0, 12.0, None])
def test_decays_and_betas_of_any_size(dtype, rates, write):
    """From heads that keep all to heads that forget all, and from betas of 0 to those of 1."""
    _compare(_draw(dtype, 130, rates=rates, write=write, seed=1), dtype)


@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_heads_that_forget_fast_at_some_tokens_alone(dtype):
    """Sums of decays of thousands, whose differences are small."""
    case = _draw(dtype, 130, rates=1e-3)
    case.decay.fill_(-2.0)
    case.decay[5::7] = 12.0
    case.weights.rates.fill_(-60.0)
    case.weights.offsets.fill_(-6.0)
    _compare(case, dtype)


@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_tokens_that_are_alike(dtype):
    """The system is as full as it gets: every key is the same, and is written whole."""
    case = _draw(dtype, 130, rates=0.0, write=12.0)
    case.inputs.copy_(case.inputs[:1].expand_as(case.inputs))
    _compare(case, dtype)


@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_sums_stay_f32(dtype):
    """The state is nearer to fp64 than its operands' type can tell, where q, k and v are the same in both."""
    case = _draw(dtype, 130, rates=0.02)
    case.weights.taps.zero_()
    case.weights.taps[:, -1] = 1
    _, _, matrix = delta_nets.expected(case)
    case.prefill()
    error = (case.matrix.double() - matrix).abs().max() / matrix.abs().max()
    assert error < HALF[dtype] / 32, f"state: off by {float(error):.3g} of its largest value"


@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("key_heads", "shared"), [(2, 1), (2, 3), (1, 8)])
def test_heads_that_share_keys(dtype, key_heads, shared):
    _compare(_draw(dtype, 65, key_heads, shared), dtype)


@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("lengths", [(64, 66), (1, 129), (2, 128), (63, 67), (127, 2, 1)])
def test_passes_behind_each_other_are_one_pass(dtype, lengths):
    """The state and the columns go on; where a pass ends with a chunk, bit for bit."""
    whole = _draw(dtype, sum(lengths), 1, 2)
    columns, matrix = whole.columns.clone(), whole.matrix.clone()
    expected, first, parts = whole.prefill(), 0, []
    for tokens in lengths:
        span = slice(first, first + tokens)
        named = {name: getattr(whole, name)[span] for name in ("inputs", "gates", "write", "decay")}
        parts.append(replace(whole, **named, columns=columns, matrix=matrix).prefill())
        first += tokens
    assert torch.equal(columns, whole.columns)
    found = torch.cat(parts)
    tolerance = 0 if lengths[0] == 64 else 4 * HALF[dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance, msg=_named("out"))
    tolerance = min(tolerance, 2**-12)
    torch.testing.assert_close(matrix, whole.matrix, rtol=tolerance, atol=tolerance, msg=_named("state"))


@pytest.mark.usefixtures("counts")
def test_groups_of_chunks_give_the_bits_of_all_together():
    found = []
    for chunks in (1, 2, 3):
        case = _draw(torch.bfloat16, 130, 1, 2)
        size = chunks * delta_memory.chunk_bytes(1, 2)
        out = case.prefill(guarded(torch.full((size,), 0xFF, dtype=torch.uint8)))
        found.append((out, case.matrix, case.columns))
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))


def test_matrices_are_loaded_without_conflicts_of_banks(counts):
    _draw(torch.float16, 130).prefill()
    assert counts[0] > 1000
    assert counts[1] == 0


@pytest.mark.usefixtures("counts")
def test_the_workspace_is_what_is_planned(library, monkeypatch):
    for key_heads, shared in ((1, 1), (2, 3), (16, 3), (16, 2)):
        planned = delta_memory.chunk_bytes(key_heads, shared)
        assert library.delta_chunk_bytes_on_cpu(key_heads, shared) == planned
        for tokens in (2, 64, 1024, 2048, 100_000):
            chunks = delta_memory.group_chunks(tokens, key_heads, shared)
            assert delta_memory.kernel_bytes(tokens, key_heads, shared) == chunks * planned
            assert planned <= delta_memory.kernel_bytes(tokens, key_heads, shared) <= delta_memory.WORKSPACE_BYTES
    monkeypatch.setattr(delta_memory, "WORKSPACE_BYTES", 1)
    assert delta_memory.group_chunks(2048, 16, 3) == 1
    _compare(_draw(torch.float16, 65), torch.float16)


@pytest.mark.usefixtures("counts")
def test_not_a_number_stays_in_its_head_and_behind_its_chunk():
    case = _draw(torch.bfloat16, 70, 1, 2)
    case.inputs[67, 2 * 128 + 5] = torch.nan  # v of the first head
    found = case.prefill()
    assert found[:64].isfinite().all()
    assert found[67:, :128].isnan().all()
    assert found[:, 128:].isfinite().all()
    assert case.matrix[0, :, 5].isnan().all()
    assert case.matrix[0, :, 6:].isfinite().all()
    assert case.matrix[1].isfinite().all()


@pytest.mark.usefixtures("counts")
def test_operands_that_do_not_fit_are_refused_by_name():
    for name, value, message in (
        ("inputs", slice(1, None), "gates has shape"),
        ("write", slice(1, None), "write has shape"),
        ("columns", slice(1, None), "columns has shape"),
    ):
        case = _draw(torch.bfloat16, 3)
        setattr(case, name, getattr(case, name)[value])
        with pytest.raises(ValueError, match=message):
            case.prefill()
    case = _draw(torch.bfloat16, 3)
    with pytest.raises(ValueError, match="delta_prefill: chunks = 0, must be from 1"):
        case.prefill(torch.empty(100, dtype=torch.uint8))


@pytest.mark.usefixtures("counts")
def test_the_self_test_passes_and_sees_a_wrong_result(monkeypatch):
    checks.CHECKS["delta_prefill"](CPU)
    right = delta_nets.expected
    monkeypatch.setattr(delta_nets, "expected", lambda case: (right(case)[0] * 1.02, *right(case)[1:]))
    with pytest.raises(Mismatch):
        checks.CHECKS["delta_prefill"](CPU)
