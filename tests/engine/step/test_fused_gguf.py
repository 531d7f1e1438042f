"""GGUF blocks in the fused step: operands, types that differ, launches, by torch on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from localq.engine.step import fused_experts
from localq.engine.step.operands import fusable, operand
from localq.formats import gguf
from localq.formats.expert_linears import LinearStack, table_bytes
from localq.formats.gguf import codec as gguf_codec
from localq.formats.gguf import kernel as gguf_kernel
from localq.models.decoder import Decoder
from localq.models.experts import Experts, Mixture
from tests.support.engine import step_stand_ins
from tests.support.engine.fused_steps import logits_of_launches, operations, small_qwen3, small_qwen3_moe
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


def mixture_in_blocks(types: tuple[str, str, str]) -> Decoder:
    """Gate, up and down of every expert in blocks of these types."""
    model = small_qwen3_moe()
    hidden = model.config.hidden

    def linear(out: int, columns: int, type: str, seed: int) -> gguf.Linear:
        return gguf.Linear(gguf.sample((out, columns), seed, scheme=type)).tile_()

    for experts in [each for each in model.modules() if isinstance(each, Experts)]:
        pairs, downs = [], []
        for expert in range(experts.count):
            pairs.append([linear(experts.width, hidden, type, 3 * expert + n) for n, type in enumerate(types[:2])])
            downs.append([linear(hidden, experts.width, types[2], 3 * expert + 2)])
        del experts.gate_up_proj, experts.down_proj
        experts.gate_up_proj, experts.down_proj = LinearStack(pairs), LinearStack(downs)
    return model


@pytest.mark.parametrize("types", [("Q8_0", "Q8_0", "Q5_1"), ("Q8_0", "Q5_0", "Q8_0")], ids=str)
def test_experts_of_a_mixture_are_two_launches(monkeypatch, types):
    """Gates and ups of two types are one operation of two kernels, and a buffer between them, which is planned."""
    step_stand_ins.install(monkeypatch)
    model = mixture_in_blocks(types)
    with torch.inference_mode():
        logits = logits_of_launches(model)
        expected = tiny_models.logits_in_steps(model)[sum(PREFILL) :]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
    layer = ["qkv", "attention", "o", "router", "gate_up", "down"]
    assert operations(model) == ["embed", *layer * model.config.layers, "head", "sample"]
    experts = next(each for each in model.modules() if isinstance(each, Experts))
    assert table_bytes(model) == 8 * 3 * experts.count * model.config.layers
    assert fused_experts.has_two_types(model) == (types[0] != types[1])
    given = (model.config, torch.float16, torch.device("cpu"), False)
    plain, more = (fused_experts.ExpertLaunches(*given, two_types=each).bytes() for each in (False, True))
    assert more - plain == 4 * model.config.experts_active * model.config.expert_width


def test_experts_that_differ_have_no_launch():
    matrices = [[gguf.Linear(gguf.sample((32, 256), 1, scheme=type)).tile_()] * 2 for type in ("Q8_0", "Q5_0")]
    assert LinearStack(matrices).stack is None
    model = mixture_in_blocks(("Q8_0", "Q8_0", "Q8_0"))
    mixture = next(each for each in model.modules() if isinstance(each, Mixture))
    mixture.experts.gate_up_proj.stack = None
    assert fused_experts.why_not(mixture, torch.float16) == "no kernel supports experts in this format"
