"""Mixtures of random configurations against transformers: what two features do to each other, in uneven pieces."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from localq.engine.cache import KVCache
from localq.models import ARCHITECTURES, decoder
from tests.support.models import tiny_models
from tests.support.models.tiny_case import SHAPE, Case
from tests.support.models.tiny_models import CONTEXT

TOKENS = 48


def rope(choose: random.Random) -> dict[str, Any]:
    """None, or one of the scalings with some of its optional keys."""
    kind = choose.choice(["default", "yarn", "yarn", "linear", "llama3"])
    said: dict[str, Any] = {"rope_type": kind, "rope_theta": choose.choice([500.0, 1e6])}
    if kind != "default":
        said["factor"] = choose.choice([2.0, 3.5])
    if kind == "llama3":
        said |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    if kind == "yarn":
        said["original_max_position_embeddings"] = choose.choice([12, 20, 40])
        more = {"beta_fast": 3.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.3, "mscale": 0.7,
                "mscale_all_dim": 0.5}  # fmt: skip
        said |= {key: value for key, value in more.items() if choose.random() < 0.4}
    return said


def drawn(seed: int) -> dict[str, Any]:
    """A `config.json`."""
    choose = random.Random(seed)
    kind = ("gpt_oss", "mixtral", "qwen3_moe")[seed % 3]
    experts, layers = choose.choice([1, 2, 5, 9]), choose.choice([2, 3, 5])
    config = {
        "model_type": kind, **SHAPE, "num_hidden_layers": layers, "num_attention_heads": 6, "head_dim": 14,
        "num_key_value_heads": choose.choice([1, 2, 6]), "tie_word_embeddings": choose.random() < 0.5,
        "num_experts_per_tok": choose.randint(1, experts), "sliding_window": choose.choice([1, 3, 9, 40]),
        "rope_parameters": rope(choose),
    }  # fmt: skip
    if kind != "mixtral":
        config["attention_bias"] = choose.random() < 0.5
    if kind == "gpt_oss":
        return {**config, "num_local_experts": experts, "swiglu_limit": choose.choice([0.5, 7.0])}
    if kind == "mixtral":
        return {**config, "num_local_experts": experts}
    return {
        **config, "num_experts": experts, "moe_intermediate_size": choose.choice([20, 44]),
        "norm_topk_prob": choose.random() < 0.5, "decoder_sparse_step": choose.choice([1, 2, 3]),
        "mlp_only_layers": choose.sample(range(layers), choose.randint(0, layers)),
        "use_sliding_window": choose.random() < 0.7, "max_window_layers": choose.choice([1, 2]),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(9))
def test_a_random_mixture_in_random_pieces_gives_the_logits_of_transformers(seed, monkeypatch):
    case, choose = Case("random", drawn(seed), lambda config: {}), random.Random(seed)
    reference = tiny_models.reference(case)
    ids = torch.randint(3, SHAPE["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = reference(ids[None], use_cache=False).logits[0].float()
    config = ARCHITECTURES[case.config["model_type"]].Config.from_dict(case.config)
    model = tiny_models.load(config, case, reference.state_dict())
    if seed % 2:  # as on a GPU: the host does not know the position
        monkeypatch.setattr(decoder, "host_start", lambda positions: None)
    cache, parts, start = KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu"), [], 0
    while start < TOKENS:
        stop = min(TOKENS, start + choose.choice([1, 1, 2, 7, 16]))
        live = -(-stop // 16) * 16 if seed % 2 else stop
        with torch.inference_mode():
            parts.append(model(ids[start:stop], torch.arange(start, stop), cache, live, last_only=False))
        start = stop
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-4)
