"""Architectures: one module per family, which exports `Config`, `Model` and `rename`; `architecture` finds it.

`decoder.py` is the decoder that families vary; its parts are in `attention.py`, `latent_attention.py`,
`gated_delta_net.py`, `mamba2.py`, `recurrent.py`, `layers.py`, `rope.py`, `experts.py` and `mixtures.py`, its facts in
`config.py`; `unstacked_experts.py` serves the quantizer. Not here: checkpoints and formats (`engine/load`, `formats`),
the torch-free traits of a model type (`files/model_types.py`). Called by the engine, `quantize` and `bench`. Open
`llama.py`, then `decoder.py`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from localq.errors import LocalqError
from localq.models import (
    cohere2_moe,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    glm4_moe_lite,
    gpt_oss,
    granite,
    granitemoehybrid,
    laguna,
    lfm2,
    lfm2_moe,
    llama,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    muse_glimmer,
    nemotron_h,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_vl,
    seed_oss,
    smollm3,
)

ARCHITECTURES: dict[str, ModuleType] = {
    "cohere2_moe": cohere2_moe,
    "exaone4": exaone4,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "gemma4": gemma4,
    "gemma4_text": gemma4,
    "gemma4_unified": gemma4,
    "gemma4_unified_text": gemma4,
    "glm4_moe_lite": glm4_moe_lite,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "granitemoehybrid": granitemoehybrid,
    "laguna": laguna,
    "llama": llama,
    "ministral3": ministral3,
    "mistral": mistral,
    "mistral3": mistral3,
    "mixtral": mixtral,
    "muse_glimmer": muse_glimmer,
    "muse_glimmer_text": muse_glimmer,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "nemotron_h": nemotron_h,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_text": qwen3_5,
    "qwen3_moe": qwen3_moe,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_text": qwen3_vl,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
}


def architecture(config: dict[str, Any], name: str = "config.json") -> ModuleType:
    """Return the module for a `config.json`; LocalqError for an unknown `model_type`; name: the model, for errors."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    supported = ", ".join(sorted(ARCHITECTURES))
    raise LocalqError(name, f"the architecture {repr(model_type)[:80]} is not supported", f"Supported: {supported}.")
