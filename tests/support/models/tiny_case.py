"""`Case`: the configuration of a tiny model with oddities, and what to leave out so that its logits change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from localq.models.config import DecoderConfig

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 92,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 80,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD = {"head_dim": 14}  # 6 * 14 = 84 is not hidden
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 10,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}


MUSE_LAST = "model.language_model.norm.weight"
MUSE_TOWER = {  # fields of muse_glimmer besides those of its text: the tower of images, and the way from it to the text
    "vision_config": {
        "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 4,
        "pos_emb_height": 2, "pos_emb_width": 2,
    },
    "out_hidden_size": 48,
    "projector_hidden_size": 16,
}  # fmt: skip


QWEN_TOWER = {  # fields of qwen3_vl besides those of its text
    "vision_config": {
        "depth": 1, "hidden_size": 12, "num_heads": 1, "intermediate_size": 12, "out_hidden_size": 72, "patch_size": 4,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    },
}  # fmt: skip
TEXT_TOWERS = {"muse_glimmer_text": MUSE_TOWER, "qwen3_vl_text": QWEN_TOWER}  # text models that only wrappers run


@dataclass(frozen=True)
class Case:
    """A configuration in the form of `config.json`, and what to take from it so that the logits must change."""

    name: str
    config: dict[str, Any]
    without: Callable[[DecoderConfig], dict[str, Any]]


def case_of(name: str, model_type: str, without: Callable[[DecoderConfig], dict[str, Any]], **config: Any) -> Case:
    return Case(name, {"model_type": model_type, **SHAPE, **config}, without)


def no_windows(config: DecoderConfig) -> dict[str, Any]:
    assert any(config.windows)
    return {"windows": (0,) * config.layers}


def plain_ropes(config: DecoderConfig) -> dict[str, Any]:
    ropes = [rope and replace(rope, kind="default", attention_factor=1.0) for rope in config.ropes]
    assert tuple(ropes) != config.ropes
    return {"ropes": tuple(ropes)}


def one_rope(config: DecoderConfig) -> dict[str, Any]:
    assert len(set(config.ropes)) == 2
    return {"ropes": (config.rope_kinds[0],) * config.layers}


def whole_heads_turn(config: DecoderConfig) -> dict[str, Any]:
    assert all(rope and rope.rotary_dim < config.head_dim for rope in config.ropes)
    return {"ropes": tuple(rope and replace(rope, rotary_dim=config.head_dim) for rope in config.ropes)}


def all_pairs_turn(config: DecoderConfig) -> dict[str, Any]:
    assert any(rope and 0 < rope.turning < rope.rotary_dim for rope in config.ropes)
    return {"ropes": tuple(rope and replace(rope, turning=rope.rotary_dim) for rope in config.ropes)}


def swap_lists(config: DecoderConfig) -> dict[str, Any]:
    swapped = [rope and replace(rope, short_factor=rope.long_factor, long_factor=rope.short_factor)
               for rope in config.ropes]  # fmt: skip
    return {"ropes": tuple(swapped)}


def truncated(config: DecoderConfig) -> dict[str, Any]:
    assert not any(rope and rope.truncate for rope in config.ropes)
    return {"ropes": tuple(rope and replace(rope, truncate=True) for rope in config.ropes)}
