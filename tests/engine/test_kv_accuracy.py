"""What a quantized KV cache costs in accuracy on the embedded model: KL of the logits against a 16-bit cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localq import kv_bits
from localq.engine.cache import KVCache
from localq.engine.load.load import load
from localq.files.model_folder import open_model
from localq.kv_bits import K8V4, KvBits
from localq.planner.load_options import LoadOptions
from localq.text.tokenizer import Tokenizer
from tests.support.files.real_model import smollm2

TEXT = Path(__file__).parents[2] / "LICENSE"  # prose that every checkout has
TOKENS = 512
# Mean KL in nats and share of equal first choices, as measured: see the docstring of engine/kv_codec.py. The bounds
# leave room for other orders of summation, not for another code.
BOUNDS: dict[KvBits, tuple[float, float]] = {8: (4e-4, 0.98), K8V4: (0.012, 0.92), 4: (0.09, 0.8)}


@pytest.fixture(scope="module")
def model():
    return load(open_model(smollm2()), LoadOptions(device="cpu", dtype="float32", ctx=TOKENS)).model


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    tokens = Tokenizer.load(open_model(smollm2())).encode(TEXT.read_text()[1000:])
    return torch.tensor(tokens[:TOKENS])


@torch.inference_mode()
def log_probabilities(model, ids: torch.Tensor, bits: KvBits) -> torch.Tensor:
    cache = KVCache(model.cache_layout(), TOKENS, torch.float32, "cpu", bits)
    return torch.log_softmax(model(ids, torch.arange(TOKENS), cache, TOKENS, last_only=False), -1)


@pytest.fixture(scope="module")
def reference(model, ids) -> torch.Tensor:
    return log_probabilities(model, ids, 16)


@pytest.mark.parametrize("bits", BOUNDS)
def test_logits_stay_near_those_of_the_16_bit_cache(model, ids, reference, bits):
    logits = log_probabilities(model, ids, bits)
    kl = (reference.exp() * (reference - logits)).sum(-1)
    same = (reference.argmax(-1) == logits.argmax(-1)).float().mean().item()
    print(f"{kv_bits.text(bits)}: mean KL {kl.mean().item():.2e}, top-1 agreement {same:.4f}")
    most, least = BOUNDS[bits]
    assert kl.mean().item() <= most
    assert same >= least
