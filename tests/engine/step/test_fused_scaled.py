"""NVFP4, FP8 and 8-bit integers in the fused step: operands, kinds that differ, launches, by torch on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from localq.engine.step.operands import fusable, operand
from localq.formats import fp8, nvfp4
from localq.formats.int4 import gptq
from localq.formats.scaled import kernel as scaled_kernel
from localq.models.decoder import Decoder
from tests.support.engine import step_stand_ins
from tests.support.engine.fused_steps import logits_of_launches, operations, small_qwen3
from tests.support.kernels.scaled_operands import weight_of_tiles
from tests.support.models import tiny_models
from tests.support.models.tiny_models import PREFILL

MAKERS = {
    "nvfp4": (nvfp4, ""), "fp8": (fp8, ""), "fp8 rows": (fp8, "rows"), "int8": (gptq, "g64, 8 bits"),
    "int8 rows": (gptq, "row, 8 bits"),
}  # fmt: skip
WHOLE = ["qkv", "attention", "o", "gate_up", "down"]
CASES = {
    **{name: ({"": name}, WHOLE) for name in MAKERS},
    "attention in fp8": ({"": "nvfp4", "q_proj": "fp8", "k_proj": "fp8", "v_proj": "fp8", "o_proj": "fp8"}, WHOLE),
    "up apart": ({"": "nvfp4", "up_proj": "int8"}, ["qkv", "attention", "o", "gate_up", "gate_up", "down"]),
}  # fmt: skip


def quantized(model: Decoder, kinds: dict[str, str]) -> None:
    """All linears of the blocks in the kind of their leaf, or in the common one."""
    for seed, (path, plain) in enumerate(list(model.named_modules())):
        if not isinstance(plain, nn.Linear) or "layers." not in path:
            continue
        parent, _, leaf = path.rpartition(".")
        module, scheme = MAKERS[kinds.get(leaf, kinds[""])]
        packed = module.sample((plain.out_features, plain.in_features), seed, scheme=scheme)
        setattr(model.get_submodule(parent), leaf, module.Linear(packed, plain.bias).tile_())


@pytest.mark.parametrize("case", CASES)
def test_launches_give_the_logits_of_the_modules(case, monkeypatch):
    step_stand_ins.install(monkeypatch)

    def product(x, operands, **around):
        assert len({each.kind for each in operands}) == 1
        step_stand_ins.products(x, [weight_of_tiles(each) for each in operands], operands, **around)

    monkeypatch.setattr(scaled_kernel, "scaled_gemv", product)
    kinds, launches = CASES[case]
    model = small_qwen3(intermediate_size=192, num_attention_heads=8, num_key_value_heads=4)
    quantized(model, kinds)
    with torch.inference_mode():
        logits = logits_of_launches(model)
        expected = tiny_models.logits_in_steps(model)[sum(PREFILL) :]
    slack = 3e-3 if "int8" in case or case == "up apart" else 2e-4  # whose definition rounds weights to 16 bit
    torch.testing.assert_close(logits, expected, rtol=0, atol=slack)
    assert operations(model) == ["embed", *launches * model.config.layers, "head", "sample"]


def test_what_one_launch_takes():
    one, divided, other = (
        operand(module.Linear(module.sample((48, 256), 1, scheme=scheme)).tile_())
        for module, scheme in ((nvfp4, ""), (nvfp4, "divided"), (fp8, "rows"))
    )
    assert fusable([one, divided])
    assert not fusable([one, other])
