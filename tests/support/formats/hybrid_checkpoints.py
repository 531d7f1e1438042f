"""Checkpoints of tiny hybrids (qwen3_5 and its mixture) as they are published: in wrappers, with towers and drafts.

As in `expert_checkpoints`, nothing goes through localq's own writers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.formats.expert_checkpoints import CONFIGS, nf4, read, write
from tests.support.models.tiny_checkpoints import make_checkpoint

KINDS = ("qwen3_5", "qwen3_5_moe")
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")
LINEAR = re.compile(
    r".*\.(?:self_attn\.[qkvo]_proj|linear_attn\.(?:in_proj_\w+|out_proj)|mlp\.(?:gate|shared_expert_gate)"
    r"|(?:mlp|shared_expert|experts\.\d+)\.(?:gate|up|down)_proj)\.weight"
)


def source(folder: Path, kind: str, **overrides: Any) -> Path:
    """The text model in bfloat16, a matrix for each expert."""
    return make_checkpoint(folder, f"{kind}_text", initializer_range=0.15, **overrides)


def wrapped(folder: Path, text: Path, prefix: str, **config: Any) -> Path:
    """The model `text` in its multimodal wrapper, tensors under `prefix`, with a tower and a layer of drafts."""
    stated = json.loads((text / "config.json").read_text())
    head = "language_model." if prefix.startswith("language_model.") else ""
    held = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else head + name: each
        for name, each in read(text).items()
    }
    layer = "model.layers.1."
    drafts = {name for name in read(text) if name.startswith(layer)}
    held |= {f"mtp.layers.0.{name.removeprefix(layer)}": read(text)[name] for name in drafts}
    held |= {"mtp.fc.weight": torch.ones(128, 256), "mtp.norm.weight": torch.ones(128)}
    held |= {
        "model.visual.blocks.0.attn.qkv.weight": torch.ones(36, 12),
        "model.visual.merger.norm.weight": torch.ones(12),
    }
    quantization = {key: stated.pop(key) for key in ("quantization_config",) if key in stated}
    outer = {
        "model_type": stated["model_type"].removesuffix("_text"),
        "text_config": stated,
        "vision_config": {"depth": 1, "hidden_size": 12},
        "tie_word_embeddings": stated["tie_word_embeddings"],
        **quantization,
        **config,
    }
    made = write(folder, held, text)
    (made / "config.json").write_text(json.dumps(outer))
    return made


def in_nf4(folder: Path, text: Path, skipped: Callable[[str], bool]) -> tuple[Path, Path]:
    """(the model in bitsandbytes' NF4, the same dequantized): all its Linears but those that are `skipped`."""
    packed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for number, (name, weight) in enumerate(sorted(read(text).items())):
        if not LINEAR.fullmatch(name) or skipped(name):
            packed[name] = plain[name] = weight
            continue
        made, plain[name] = nf4(name.removesuffix(".weight"), weight, number)
        packed |= made
    kept = sorted({name.removesuffix(".weight") for name in read(text) if LINEAR.fullmatch(name) and skipped(name)})
    stated = {**CONFIGS["nf4"], "llm_int8_skip_modules": ["lm_head", *kept]}
    return write(folder / "packed", packed, text, quantization_config=stated), write(folder / "plain", plain, text)
