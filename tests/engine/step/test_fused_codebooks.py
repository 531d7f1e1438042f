"""Linears with books of 256 codewords in the fused step: operands, rotations and launches, by torch on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from localq.engine.step.operands import fusable, operand
from localq.formats.codebooks import aqlm, lookup_kernel, rotation, vq2
from localq.formats.codebooks import rotation_kernel as kernel
from localq.kernels.operand import share_tables
from localq.models.decoder import Decoder
from tests.support.engine import step_stand_ins
from tests.support.engine.fused_steps import logits_of_launches, operations, small_qwen3
from tests.support.kernels.vq_operands import weights_of
from tests.support.models import tiny_models
from tests.support.models.tiny_models import PREFILL


def random_vq2(out: int, columns: int, signs: torch.Tensor | None, bias: torch.Tensor | None = None) -> vq2.Linear:
    codes = torch.randint(256, (out, columns // 4), dtype=torch.uint8)
    book = (codes, (torch.randn(256, 16) / (2 * columns**0.5)).half())
    packed = vq2.Packed((book,), 0.5 + torch.rand(out).half(), signs, (out, columns))
    linear = vq2.Linear(packed, bias)
    linear.put_into_tiles()
    return linear


def in_vq2(model: Decoder, rotated: str) -> None:
    """All linears of the blocks; signs of their own ("own"), the same for all of one width ("shared"), none ("no"), or
    of their own but for those that come first among those that read the same ("later")."""
    torch.manual_seed(4)
    widths: dict[int, torch.Tensor] = {}
    for path, plain in list(model.named_modules()):
        if not isinstance(plain, nn.Linear) or "layers." not in path:
            continue
        columns = plain.in_features
        signs = torch.randint(256, (columns // 8,), dtype=torch.uint8)
        signs = widths.setdefault(columns, signs) if rotated == "shared" else signs
        bare = rotated == "no" or (rotated == "later" and path.endswith(("q_proj", "gate_proj")))
        linear = random_vq2(plain.out_features, columns, None if bare else signs.clone(), plain.bias)
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, linear)


@pytest.fixture
def stand_ins(monkeypatch):
    """The calls of `vq_gemv`: how many matrices, and whether x is rotated."""
    step_stand_ins.install(monkeypatch)
    calls = []

    def product(x, operands, **around):
        calls.append((len(operands), operands[0].signs is not None))
        step_stand_ins.vq_gemv(x, operands, **around)

    monkeypatch.setattr(lookup_kernel, "vq_gemv", product)
    return calls


TOGETHER, APART = ["gate_up"], ["gate_up"] * 2  # apart torch computes act(gate) * up
# Launches of the MLP's first half, and the calls of a layer.
LAUNCHES = {
    "no": (TOGETHER, [(3, False), (1, False), (2, False), (1, False)]),
    "shared": (TOGETHER, [(3, True), (1, True), (2, True), (1, True)]),
    "own": (APART, [(1, True)] * 7),
    "later": (APART, [(1, False), *[(1, True)] * 3, (1, False), *[(1, True)] * 2]),
}


@pytest.mark.parametrize("rotated", LAUNCHES)
def test_launches_give_the_logits_of_the_modules(rotated, stand_ins):
    model = small_qwen3()
    in_vq2(model, rotated)
    with torch.inference_mode():
        logits = logits_of_launches(model)
        expected = tiny_models.logits_in_steps(model)[sum(PREFILL) :]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
    opened, calls = LAUNCHES[rotated]
    layer = ["qkv", "attention", "o", *opened, "down"]
    assert operations(model) == ["embed", *layer * model.config.layers, "head", "sample"]
    assert stand_ins[: len(calls)] == calls


def test_what_one_launch_takes():
    signs = torch.randint(256, (8,), dtype=torch.uint8)
    pair = [operand(random_vq2(out, 64, signs.clone())) for out in (48, 16)]
    other = operand(random_vq2(48, 64, ~signs))
    assert not fusable(pair)  # their signs lie at two places
    shared = share_tables([*pair, other])
    assert fusable(shared[:2])
    assert not fusable(shared)
    assert pair[0].halves() is None
    assert pair[0].bytes() == 48 * 16 + 8192 + 2 * 48
    assert not pair[0].readable(torch.float16)  # on the CPU


def test_a_module_rotates_several_rows_and_leaves_one_to_its_product(monkeypatch):
    linear, x = random_vq2(48, 64, torch.randint(256, (8,), dtype=torch.uint8)), torch.randn(3, 64).half()
    calls = []
    monkeypatch.setattr(lookup_kernel, "vq_gemv", lambda x, operands: calls.append((x, operands[0].signs)))
    monkeypatch.setattr(kernel, "hadamard", rotation.rotate)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    linear(x[:1])
    linear(x)
    (alone, signs), (several, none) = calls
    assert torch.equal(alone, x[:1])
    assert signs is linear.signs
    assert none is None
    monkeypatch.undo()
    assert torch.equal(several, rotation.rotate(x, linear.signs))


def test_aqlm_of_8_bit_codes_is_an_operand_once_in_tiles():
    codes = torch.randint(-128, 128, (40, 8, 2), dtype=torch.int8)
    linear = aqlm.Linear(aqlm.Packed(codes, torch.randn(2, 256, 1, 8).half(), torch.ones(40, 1, 1, 1).half()))
    assert operand(linear) is None
    linear.put_into_tiles()
    found = operand(linear)
    assert found is not None
    torch.testing.assert_close(weights_of(found), aqlm.dequantize(linear.packed, torch.float32), rtol=1e-3, atol=1e-3)
    assert fusable([found, found])
    assert not fusable([found, operand(random_vq2(40, 64, None))])
