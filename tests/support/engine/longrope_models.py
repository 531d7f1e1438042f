"""A random phi3 with longrope whose two lists of factors differ, so that a reply shows which one was used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

ORIGINAL, CONTEXT, VOCAB = 64, 256, 320  # positions of the pretraining and of the model, tokens


def save_phi3(path: Path, hidden: int, short: Sequence[float], long: Sequence[float], dtype: torch.dtype) -> Path:
    """Write a phi3 of two layers and four heads of `hidden` / 4 to the folder `path`; returns it.

    short, long: a factor for each pair of dimensions of a head
    """
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL,
        "short_factor": list(short), "long_factor": list(long),
    }  # fmt: skip
    config = Phi3Config(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = Phi3ForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.15)
    model.to(dtype).save_pretrained(path)
    return path
