"""AWQ and GPTQ in the fused step: operands, the order of columns, launches, by torch on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from localq.engine.step.operands import fusable, operand
from localq.formats.int4 import codec as int4_codec
from localq.formats.int4 import kernel as int4_kernel
from localq.formats.int4.linear import Int4Linear
from localq.kernels.operand import share_tables
from localq.models.decoder import Decoder
from tests.support.engine import step_stand_ins
from tests.support.engine.fused_steps import logits_of_launches, operations, small_qwen3
from tests.support.kernels.int4_operands import packed_of
from tests.support.kernels.reference_kernels import int4_packed
from tests.support.models import tiny_models
from tests.support.models.tiny_models import PREFILL


def linear_of(out: int, columns: int, seed: int, like: int | None, bias: torch.Tensor | None = None) -> Int4Linear:
    """In tiles; columns in a random order of the seed `like`, or as they are."""
    packed = packed_of((out, columns), 32, seed, act_order=like is not None)
    if like is not None:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(like))
        packed = replace(packed, order=int4_codec.as_order(order))
    scales = packed.scales * 0.1
    return Int4Linear(replace(packed, scales=scales), bias).tile_()


def in_int4(model: Decoder, order: str) -> None:
    """All linears of the blocks: columns as they are ("none"), in one order for those that read the same x ("one"), in
    orders of their own ("own")."""
    for seed, (path, plain) in enumerate(list(model.named_modules())):
        if not isinstance(plain, nn.Linear) or "layers." not in path:
            continue
        like = {"none": None, "one": plain.in_features, "own": seed}[order]
        parent, _, leaf = path.rpartition(".")
        linear = linear_of(plain.out_features, plain.in_features, seed, like, plain.bias)
        setattr(model.get_submodule(parent), leaf, linear)


LAUNCHES = {
    "none": ["qkv", "attention", "o", "gate_up", "down"],
    "one": ["qkv", "attention", "o", "gate_up", "down"],
    "own": ["qkv", "attention", "o", "gate_up", "gate_up", "down"],  # gate * up by torch, behind their products
}


@pytest.mark.parametrize("order", LAUNCHES)
def test_launches_give_the_logits_of_the_modules(order, monkeypatch):
    step_stand_ins.install(monkeypatch)
    seen = []

    def product(x, operands, **around):
        weights = [int4_codec.dequantize(int4_packed(each), torch.float32) for each in operands]
        seen.append(len(operands))
        step_stand_ins.products(x, weights, operands, **around)

    monkeypatch.setattr(int4_kernel, "int4_gemv", product)
    model = small_qwen3(intermediate_size=192, num_attention_heads=8, num_key_value_heads=4)
    in_int4(model, order)
    with torch.inference_mode():
        logits = logits_of_launches(model)
        expected = tiny_models.logits_in_steps(model)[sum(PREFILL) :]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
    assert set(seen) == ({1} if order == "own" else {1, 2, 3})
    assert operations(model) == ["embed", *LAUNCHES[order] * model.config.layers, "head", "sample"]


def test_what_one_launch_takes():
    pair = [operand(linear_of(out, 64, out, like=1)) for out in (48, 16)]
    assert not fusable(pair)  # their orders lie at two places
    others = [operand(linear_of(48, 64, 3, like)) for like in (2, None)]
    shared = share_tables([*pair, *others])
    assert fusable(shared[:2])
    assert not fusable([shared[0], shared[2]])
    assert not fusable([shared[0], shared[3]])
    plain = Int4Linear(packed_of((48, 64), 64)).tile_()
    assert not fusable([operand(plain), others[1]])  # groups of other sizes
    assert pair[0].halves() is None
    assert pair[0].bytes() == 48 * 32 + 2 * 48 * 2 + 2 * 24 + 2 * 64
    assert not pair[0].readable(torch.float16)  # on the CPU


def test_a_row_too_wide_for_the_kernel_to_gather_is_put_in_order_before(monkeypatch):
    """And is none for the fused step, which has no launch for that."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(int4_kernel, "WIDEST_ORDER", 128)
    gathered = []

    def product(x, operands):
        (matrix,) = operands
        gathered.append(matrix.order is not None)
        return nn.functional.linear(x, int4_codec.dequantize(int4_packed(matrix), torch.float16))

    monkeypatch.setattr(int4_kernel, "int4_gemv", product)
    for columns in (128, 192):
        linear = linear_of(48, columns, 3, like=1)
        for rows in (1, 3):
            x = torch.randn(rows, columns).half()
            expected = nn.functional.linear(x.double(), int4_codec.dequantize(linear.packed, torch.float64))
            torch.testing.assert_close(linear(x).double(), expected, rtol=0, atol=1e-2)
        assert operand(linear).readable() == (columns == 128)
    assert gathered == [True, False, False, False]


def test_matrices_of_odd_sizes_stay_as_they_are():
    packed = packed_of((24, 64), 32, act_order=True)
    linear = Int4Linear(packed).tile_()
    assert operand(linear) is None
    x = torch.randn(3, 64)
    expected = torch.nn.functional.linear(x, int4_codec.dequantize(packed, torch.float32))
    assert torch.equal(linear(x), expected)
    torch.testing.assert_close(linear._by_slabs(x), expected)


@pytest.mark.parametrize("act_order", [False, True])
def test_tiles_dequantize_to_the_same(act_order):
    packed = packed_of((48, 192), 64, scales=torch.bfloat16, act_order=act_order)
    expected, x = int4_codec.dequantize(packed, torch.float32), torch.randn(2, 192)
    linear = Int4Linear(int4_codec.Packed(packed.codes.clone(), packed.scales.clone(), packed.zeros.clone(),
                                          packed.order, 64, packed.in_order)).tile_()  # fmt: skip
    assert torch.equal(int4_codec.dequantize(linear.packed, torch.float32), expected)
    columns = int4_codec.columns_of(packed.order) if act_order else torch.arange(192)
    assert torch.equal(linear.dequantized_rows(16, 32, torch.float32, None), expected[16:, columns])
    linear.scratch = torch.empty(4 * 192 * 20, dtype=torch.uint8)
    torch.testing.assert_close(linear._by_slabs(x), torch.nn.functional.linear(x, expected))
