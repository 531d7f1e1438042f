"""The 8-bit format: a case by hand, its bounds, and what it costs the head of a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from localq.engine.cache import KVCache
from localq.engine.load.load import load
from localq.files.model_folder import open_model
from localq.formats import int8, nf4
from localq.planner.load_options import LoadOptions
from localq.text.tokenizer import Tokenizer
from tests.support.files.real_model import smollm2

TEXT = Path(__file__).parents[3] / "LICENSE"  # prose that every checkout has
TOKENS = 512


def test_codes_and_scales_by_hand():
    weight = torch.zeros(2, 16)
    weight[0, :5] = torch.tensor([254.0, -254.0, 1.0, 3.0, -5.0])  # scale 2: 127, -127, 0.5 -> 0, 1.5 -> 2, -2.5 -> -2
    packed = int8.quantize(weight)
    assert packed.codes[0, :5].tolist() == [127, -127, 0, 2, -2]
    assert packed.scales.tolist() == [2.0, 0.0]
    assert int8.dequantize(packed, torch.float32)[0, :5].tolist() == [254.0, -254.0, 0.0, 4.0, -4.0]
    assert int8.dequantize(packed, torch.float32)[1].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_no_weight_is_further_off_than_half_a_scale(dtype):
    weight = torch.randn(5001, 48, generator=torch.Generator().manual_seed(1))  # more rows than go at a time
    weight[::9] *= 1e-4
    weight[4:, 7] *= 30
    weight = weight.to(dtype)
    packed = int8.quantize(weight)
    assert packed.codes.dtype == torch.int8
    assert packed.codes.min() >= -127
    off = (int8.dequantize(packed, torch.float32) - weight.float()).abs()
    assert (off <= packed.scales.unsqueeze(1) * 0.50001).all()


def test_a_row_that_is_not_finite_stays_so():
    weight = torch.ones(3, 16)
    weight[1, 4], weight[2, 5] = torch.inf, torch.nan
    got = int8.dequantize(int8.quantize(weight), torch.float32)
    assert got[0].eq(1).all()
    assert got[1:].isnan().all()


def test_columns_that_are_no_loads_are_refused():
    with pytest.raises(ValueError, match="weight has 24 columns"):
        int8.quantize(torch.ones(3, 24))


def test_linear_on_the_cpu_is_the_reference():
    generator = torch.Generator().manual_seed(2)
    packed = int8.quantize(torch.randn(7, 32, generator=generator))
    x, bias = torch.randn(3, 32, generator=generator), torch.randn(7, generator=generator)
    linear = int8.Linear(packed, bias)
    assert (linear.out_features, linear.in_features) == (7, 32)
    assert torch.equal(linear(x), F.linear(x, int8.dequantize(packed, torch.float32), bias))
    stored = linear.operand().codes.nbytes + linear.operand().scales.nbytes
    assert stored == int8.bytes(7, 32)


def coded_heads(head: Tensor) -> dict[str, Tensor]:
    """The head in 8 bits, in 8 bits with a scale per 64 columns instead of per row, and in NF4; f32 again."""
    blocks = int8.dequantize(int8.quantize(head.reshape(-1, 64)), torch.float32)
    return {
        "8 bit": int8.dequantize(int8.quantize(head), torch.float32),
        "8 bit, 64 columns a scale": blocks.view(head.shape),
        "NF4": nf4.dequantize(nf4.quantize(head), torch.float32),
    }


@torch.inference_mode()
def test_the_logits_of_a_real_head_stay_near():
    """The figures are in the docstring of `formats.int8`; the bounds leave room for other orders of summation."""
    model = load(open_model(smollm2()), LoadOptions(device="cpu", dtype="float32", ctx=TOKENS)).model
    ids = torch.tensor(Tokenizer.load(open_model(smollm2())).encode(TEXT.read_text()[1000:])[:TOKENS])
    hidden = []
    model.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    cache = KVCache(model.cache_layout(), TOKENS, torch.float32, "cpu", 16)
    reference = torch.log_softmax(model(ids, torch.arange(TOKENS), cache, TOKENS, last_only=False), -1)
    head = model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
    results = {}
    for name, coded in coded_heads(head).items():
        logits = torch.log_softmax(F.linear(hidden[0], coded), -1)
        kl = (reference.exp() * (reference - logits)).sum(-1).mean().item()
        same = (reference.argmax(-1) == logits.argmax(-1)).float().mean().item()
        print(f"{name}: mean KL {kl:.2e}, top-1 agreement {same:.4f}")
        results[name] = kl, same
    kl, same = results["8 bit"]
    assert kl <= 1.6e-3
    assert same >= 0.98
    assert 30 * kl <= results["NF4"][0]
