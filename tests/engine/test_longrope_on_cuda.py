"""A captured step follows longrope's two lists across the original context, as the CPU does in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import ids_of, prompt_of

pytestmark = pytest.mark.cuda
ORIGINAL, CONTEXT, VOCAB, COUNT = 64, 256, 320, 12
# Logits vary by about 2.5 here; roundings to float16 through two layers add up to less than 1 % of that.
NEAR_TIE = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A float16 phi3 with heads of 64, whose pretraining had 64 of its 256 positions."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    lists = {"short_factor": [1 + i * 0.05 for i in range(32)], "long_factor": [2 + i * 0.2 for i in range(32)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL, **lists}
    config = Phi3Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = Phi3ForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.15)
    path = tmp_path_factory.mktemp("phi3")
    model.half().save_pretrained(path)
    return path


def engine_of(folder: Path, device: str, dtype: str) -> Engine:
    engine = Engine(load(open_model(folder), LoadOptions(device=device, dtype=dtype, ctx=CONTEXT)), chunk=16)
    assert engine.graphs == (device == "cuda")
    return engine


@torch.inference_mode()
def gap(folder: Path, ids: list[int], wanted: int, got: int) -> float:
    """By how much the model prefers `wanted` to `got` behind `ids`, in float32 on the CPU."""
    loaded = load(open_model(folder), LoadOptions(device="cpu", dtype="float32", ctx=CONTEXT))
    loaded.model.choose_length(len(ids))
    logits = loaded.model(torch.tensor(ids), torch.arange(len(ids)), loaded.cache, len(ids))[0]
    return float(logits[wanted] - logits[got])


def test_replies_on_both_sides_of_the_limit_and_across_it(folder):
    ours, reference = engine_of(folder, "cuda", "float16"), engine_of(folder, "cpu", "float32")
    compared = {"short": 0, "long": 0}
    for length in (20, 50, 56, 60, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 100, 150, 20):
        prompt = prompt_of(length, seed=length)
        expected, found = (ids_of(each, prompt, max_tokens=COUNT) for each in (reference, ours))
        assert len(found) == len(expected) == COUNT
        for i, (wanted, got) in enumerate(zip(expected, found, strict=True)):
            if wanted != got:
                assert gap(folder, [*prompt, *expected[:i]], wanted, got) < NEAR_TIE
                break
            compared["long" if length + i > ORIGINAL else "short"] += 1
    assert min(compared.values()) > COUNT, compared
