"""GGUF blocks in the fused step: operands, types that differ, launches, by torch on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from localq.engine.step.operands import fusable, operand
from localq.formats import gguf
from localq.formats.gguf import codec as gguf_codec
from localq.formats.gguf import kernel as gguf_kernel
from localq.models.decoder import Decoder
from tests.support.engine import step_stand_ins
from tests.support.engine.fused_steps import logits_of_launches, operations, small_qwen3
from tests.support.kernels.reference_kernels import gguf_packed
from tests.support.models import tiny_models
from tests.support.models.tiny_models import PREFILL


def in_blocks(model: Decoder, types: dict[str, str]) -> None:
    """All linears of the blocks in Q8_0, or in the type of their leaf."""
    for seed, (path, plain) in enumerate(list(model.named_modules())):
        if not isinstance(plain, nn.Linear) or "layers." not in path:
            continue
        parent, _, leaf = path.rpartition(".")
        packed = gguf.sample((plain.out_features, plain.in_features), seed, scheme=types.get(leaf, "Q8_0"))
        setattr(model.get_submodule(parent), leaf, gguf.Linear(packed, plain.bias).tile_())


WHOLE = ["qkv", "attention", "o", "gate_up", "down"]
CASES = {
    "one type": ({}, WHOLE),
    "down apart": ({"down_proj": "Q5_1"}, WHOLE),
    "v apart": ({"v_proj": "Q4_0"}, WHOLE),
    "up apart": ({"up_proj": "Q4_1"}, ["qkv", "attention", "o", "gate_up", "gate_up", "down"]),
}


@pytest.mark.parametrize("case", CASES)
def test_launches_give_the_logits_of_the_modules(case, monkeypatch):
    step_stand_ins.install(monkeypatch)
    together = set()

    def product(x, operands, **around):
        together.add(len(operands))
        assert len({each.type for each in operands}) == 1
        weights = [gguf_codec.dequantize(gguf_packed(each), torch.float32) for each in operands]
        step_stand_ins.products(x, weights, operands, **around)

    monkeypatch.setattr(gguf_kernel, "gguf_gemv", product)
    types, launches = CASES[case]
    model = small_qwen3(intermediate_size=192, num_attention_heads=8, num_key_value_heads=4)
    in_blocks(model, types)
    with torch.inference_mode():
        logits = logits_of_launches(model)
        expected = tiny_models.logits_in_steps(model)[sum(PREFILL) :]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
    assert together == {1, 2} if case == "v apart" else max(together) == 3
    assert operations(model) == ["embed", *launches * model.config.layers, "head", "sample"]


def test_what_one_launch_takes():
    one, other, small = (
        operand(gguf.Linear(gguf.sample((48, 256), 1, scheme=type)).tile_()) for type in ("Q4_K", "Q6_K", "Q4_K")
    )
    assert fusable([one, small])
    assert not fusable([one, other])
