"""attention_decode compiled for the CPU (vq_machine_on_cpu.cuh), launcher and kernel, against fp64.

Blocks of a cluster run together, clusters one after the other: that the last one joins what all have left is tested, in
both orders; that it sees their writes on a GPU is not.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import glu

from localq import kernels
from localq.engine.cache import stored_parts
from localq.errors import LocalqError
from localq.kernels import attention
from localq.kv_bits import K8V4, KV_BITS
from tests.support.kernels.attention_operands import Case, Operands, assert_as_good_as_16_bit
from tests.support.kernels.cuda_headers import compile_on_cpu

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
F16, BF16 = torch.float16, torch.bfloat16
LAYER = type("KvLayer", (ctypes.Structure,), {"_fields_": [  # csrc/attention/attention.h
    *((name, POINTER) for name in ("k", "v", "k_scales", "v_scales")),
    *((name, INT) for name in ("key_bits", "kv_heads", "head_dim", "value_bits")), ("capacity", ctypes.c_int64),
]})  # fmt: skip
STEP = type("AttentionStep", (ctypes.Structure,), {"_fields_": [
    *((name, POINTER) for name in ("qkv", "position", "base", "rotary")), ("rotary_dim", INT), ("sinks", POINTER),
    ("heads", INT), ("q_stride", INT), ("gate", POINTER), ("gate_stride", INT), ("gate_row_stride", INT),
    ("q_norm", INT), ("k_norm", INT),
    ("q_norm_weight", POINTER), ("k_norm_weight", POINTER),
    *((name, FLOAT) for name in ("q_eps", "k_eps", "scale", "softcap")), ("window", INT),
    *((name, POINTER) for name in ("out", "partials", "arrived")), ("splits", INT), ("rows", INT),
]})  # fmt: skip
MOST = 24  # splits: three clusters
ONE, SEVERAL = 130, 2200  # slots in one cluster of 8 blocks, and in several
FEATURES = {
    "plain": {},
    "window, cap and sinks": {"window": 70, "softcap": 3.0, "sinks": 1.0},
    "norm": {"norm": "gemma"},
    "gate behind q": {"gate": "in q", "norm": "llama"},
    "gate apart": {"gate": "apart"},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    found = compile_on_cpu(
        tmp_path_factory.mktemp("library"),
        "attention_on_cpu.cpp",
        ["attention/decode.cu"],
        launch="attention_launch_on_cpu.h",
        faults=("attention_decode",),
    )
    found.attention_partials_on_cpu.restype = ctypes.c_int64
    return found


class Emulated:
    """`localq._C`, and the device it runs on."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.clusters, self.backwards = library, True, False

    def attention_splits(self, kv_heads: int, device: int) -> int:
        return MOST

    def attention_partials(self, *sizes: int) -> int:
        return self.library.attention_partials_on_cpu(*sizes)

    def attention_decode(self, *, layer, q_norm, k_norm, type, device, stream, **given) -> None:
        k, v, k_scales, v_scales, key_bits, value_bits, kv_heads, head_dim, capacity = layer
        kept = LAYER(k, v, k_scales, v_scales, key_bits, kv_heads, head_dim, value_bits, capacity)
        norms = dict(zip(("q_norm", "q_norm_weight", "q_eps"), q_norm, strict=True))
        norms |= dict(zip(("k_norm", "k_norm_weight", "k_eps"), k_norm, strict=True))
        step = STEP(**given, **norms)
        self.library.attention_decode_on_cpu(
            ctypes.byref(step), ctypes.byref(kept), type, self.clusters, self.backwards
        )


@pytest.fixture
def machine(library, monkeypatch) -> Emulated:
    """The wrapper runs the kernel on the CPU."""
    found = Emulated(library)
    monkeypatch.setattr(kernels, "module", lambda: found)
    monkeypatch.setattr(attention, "check_cuda", lambda *_: None)
    monkeypatch.setattr(attention, "place", lambda _: {"device": 0, "stream": 0})
    return found


def operands_of(case: Case, splits: int = MOST) -> Operands:
    found = Operands(case, seed=case.head_dim + 1, device="cpu")
    found.workspace = attention.AttentionWorkspace(case.heads, case.kv_heads, case.head_dim, torch.device("cpu"))
    found.workspace.partials.fill_(torch.nan)
    found.workspace.splits = splits
    return found


@pytest.mark.parametrize("bits", [16, K8V4, 4])
@pytest.mark.parametrize("width", [24, 64, 256])
@pytest.mark.parametrize("name", FEATURES)
def test_features(machine, name, width, bits):
    case = Case(6, 2, width, ONE - 1, ONE + 3, F16, bits, rotary=width // 4 * 2)
    operands = operands_of(replace(case, **FEATURES[name]))
    assert_as_good_as_16_bit(operands.run(), operands)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("width", [264, 512])
@pytest.mark.parametrize("name", FEATURES)
def test_features_of_heads_loaded_in_parts(machine, name, width, dtype):
    case = Case(6, 2, width, ONE - 1, ONE + 3, dtype, 16, rotary=width // 8 * 2)
    operands = operands_of(replace(case, **FEATURES[name]))
    assert_as_good_as_16_bit(operands.run(), operands)


@pytest.mark.parametrize("heads", [1, 9, 16])
@pytest.mark.parametrize(
    ("clusters", "splits", "length"), [(True, MOST, SEVERAL), (False, MOST, SEVERAL), (False, 1, ONE), (True, 8, 1)]
)
def test_groups_of_heads_loaded_in_parts(machine, clusters, splits, length, heads):
    machine.clusters = clusters
    operands = operands_of(Case(heads, 1, 512, length - 1, length, BF16, rotary=512), splits)
    assert_as_good_as_16_bit(operands.run(), operands)
    assert not operands.workspace.arrived.any()


@pytest.mark.parametrize("bits", [8, 4])
def test_wide_heads_in_fewer_bits_are_refused(machine, bits):
    with pytest.raises(
        LocalqError, match="a KV cache below 16 bits requires a head dimension divisible by 8, up to 256"
    ):
        operands_of(Case(4, 2, 264, 3, 5, F16, bits))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("heads", [1, 9, 16])
@pytest.mark.parametrize("width", [96, 200])
def test_groups(machine, width, heads, bits):
    """Of one head, in two passes, and in two tiles of heads."""
    case = Case(heads, 1, width, 70, 71, BF16, bits, gate="in q")
    operands = operands_of(case)
    assert_as_good_as_16_bit(operands.run(), operands)


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("gate", ["in q", "apart"])
@pytest.mark.parametrize(
    ("clusters", "splits", "backwards"),
    [(True, MOST, False), (True, MOST, True), (True, 8, False), (False, MOST, True), (False, 1, False)],
    ids=["clusters", "clusters backwards", "one cluster", "blocks backwards", "one block"],
)
def test_a_gate_gives_glu_behind_attention_over_q_without_gaps(machine, clusters, splits, backwards, gate, dtype, bits):
    machine.clusters, machine.backwards = clusters, backwards
    length, width = (SEVERAL, 40) if splits == MOST else (ONE, 256)
    case = Case(5, 1, width, length - 1, length, dtype, bits, rotary=width // 2, gate=gate)
    gated, plain = operands_of(case, splits), operands_of(replace(case, gate=""), splits)
    plain.qkv = torch.cat([part.reshape(1, -1) for part in gated.parts()], -1)
    got = gated.run()
    assert_as_good_as_16_bit(got, gated)
    expected = glu(torch.cat((plain.run(), gated.gate.reshape(1, -1)), -1).float()).to(dtype)
    # Torch's exponential is another on a CPU: a last place where a result lies between two numbers.
    assert ((got.float() - expected.float()).abs() <= torch.finfo(dtype).eps * expected.float().abs()).all()
    assert (got != expected).sum() <= 2
    assert not gated.workspace.arrived.any()
    joined = gated.workspace.partials.isfinite().any()
    assert bool(joined) == (length == SEVERAL)


def test_the_launcher_refuses_by_name(machine):
    operands = operands_of(Case(4, 2, 64, 3, 5, gate="apart"))
    given = operands.gate
    operands.gate = torch.zeros(4 * 64 + 2, dtype=F16)[2:].view(4, 64)
    with pytest.raises(ValueError, match="attention_decode: gate = 4, bytes past an aligned address"):
        operands.run()
    operands.gate = given
    operands.run()


@pytest.mark.parametrize("bits", [16, K8V4, 4])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(("clusters", "length", "rows"), [(True, ONE, 2), (False, ONE, 8), (True, 3, 8), (True, 0, 2)])
def test_rows_are_as_many_tokens_one_after_the_other(machine, clusters, length, name, rows, bits):
    """The cache they leave is the same to the bit; results differ as far as the splits do."""
    machine.clusters = clusters
    case = replace(Case(6, 2, 40, length, length + rows, F16, bits, rotary=20), **FEATURES[name])
    together = operands_of(case)
    generator = torch.Generator().manual_seed(rows)
    more = 2 * torch.randn(rows - 1, together.qkv.shape[1], generator=generator)
    qkv = torch.cat((together.qkv, more.half()))
    gates = None
    if case.gate == "in q":
        gates = qkv[:, : 6 * case.q_stride].view(rows, 6, -1)[..., 40:]
    elif case.gate:
        gates = torch.randn(rows, 6, 40, generator=generator).half()
    alone = operands_of(case)
    expected = []
    for row in range(rows):
        alone.qkv, alone.position = qkv[row : row + 1].clone(), torch.tensor([length + row])
        alone.gate = None if gates is None else alone.queries[:, 40:] if case.gate == "in q" else gates[row]
        expected.append(alone.run())
    together.qkv, together.gate = qkv, gates
    together.workspace = attention.AttentionWorkspace(6, 2, 40, torch.device("cpu"), rows)
    got = together.run()
    for mine, theirs in zip(stored_parts(together.layer), stored_parts(alone.layer), strict=True):
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))
    expected = torch.cat(expected)
    assert (got - expected).abs().max() <= 2 * torch.finfo(F16).eps * expected.abs().max()
    assert not together.workspace.arrived.any()
