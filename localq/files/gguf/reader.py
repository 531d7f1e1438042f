"""A .gguf file as a Hugging Face folder: configuration, stop tokens, chat template, tensors by name.

Torch-free and numpy-free. `tensors.py` reads the data, `vocab.py` the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq.errors import ExitCode, LocalqError, bad_file
from localq.files.gguf.binary import Container, read_container
from localq.files.gguf.facts import Facts, shortest_f32
from localq.files.gguf.names import ARCHITECTURES, hugging_face_name, is_frequency_tensor
from localq.files.gguf.rope import rope_scaling

MAX_LAYERS = 256
# The file has no key for gemma's query scale. As in llama.cpp, the layer count decides: the 27B models of both
# generations use hidden / heads, the others head_dim.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
# Name in generation_config.json -> key after `general.sampling.`
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's GGUF name, ggml type number, Hugging Face shape, and offset in the file."""

    gguf_name: str
    type: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class GgufModel:
    """The header of a .gguf model.

    Keys of `tensors` are Hugging Face names; `architecture` is GGUF's name; `size` and `mtime_ns` are those of the file
    when its header was read.
    """

    path: Path
    architecture: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    chat_template: str | None
    tensors: dict[str, GgufTensor]
    size: int
    mtime_ns: int


def read_header(path: Path) -> GgufModel:
    """Read and check the header of `path`.

    Raises LocalqError: exit 8 for a damaged file, 1 for an unsupported one.
    """
    container = read_container(path)
    facts = Facts(container)
    if facts.values.get("split.count", 1) not in (0, 1):
        why = f"this is only one of {facts.values['split.count']} parts of a split file"
        raise LocalqError(str(path), why, "Merge the parts first (`llama-gguf-split --merge`).", ExitCode.FAILURE)
    if facts.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise LocalqError(
            str(path), f"the architecture '{facts.architecture}' is not supported", f"Supported: {known}."
        )
    if facts.get("expert_count", int):
        raise LocalqError(str(path), "GGUF files of MoE models are not supported", "Use the model's safetensors files.")
    tensors = _tensors(container, facts.architecture)
    config = _config(facts, tied="lm_head.weight" not in tensors)
    template = facts.values.get("tokenizer.chat_template")
    return GgufModel(
        path,
        facts.architecture,
        config,
        _generation_config(facts),
        template if isinstance(template, str) else None,
        tensors,
        container.size,
        container.mtime_ns,
    )


def _tensors(container: Container, architecture: str) -> dict[str, GgufTensor]:
    found: dict[str, GgufTensor] = {}
    for name, raw in container.tensors.items():
        if is_frequency_tensor(name):
            continue
        renamed = hugging_face_name(architecture, name)
        if renamed is None:
            why = f"contains the tensor {name!r}, which {architecture} models do not have"
            raise LocalqError(str(container.path), why, "Use a different GGUF file for this model.", ExitCode.FAILURE)
        if renamed in found:
            why = f"the tensors {found[renamed].gguf_name!r} and {name!r} both map to {renamed}"
            raise bad_file(str(container.path), why, "Download the file again.")
        found[renamed] = GgufTensor(name, raw.type, raw.shape, raw.offset)
    return found


def _config(facts: Facts, tied: bool) -> dict[str, Any]:
    heads, hidden = facts.integer("attention.head_count"), facts.integer("embedding_length")
    head_dim = facts.integer("attention.key_length", hidden // heads)
    embedding = facts.container.tensors.get("token_embd.weight")
    if embedding is None:
        raise bad_file(str(facts.container.path), "token_embd.weight is missing", "Download the file again.")
    rotary = facts.integer("rope.dimension_count", head_dim)
    config: dict[str, Any] = {
        "model_type": "gemma3_text" if facts.architecture == "gemma3" else facts.architecture,
        "hidden_size": hidden,
        "num_hidden_layers": facts.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": facts.integer("feed_forward_length"),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": facts.integer("context_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("rope.freq_base", 10_000.0),
        "rope_scaling": rope_scaling(facts, rotary),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    if rotary != head_dim:
        fraction = rotary / head_dim
        # Readers compute int(factor * head_dim): int((30 / 44) * 44) is 29, one too few.
        exact = int(fraction * head_dim) == rotary
        config["partial_rotary_factor"] = fraction if exact else math.nextafter(fraction, 1.0)
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = facts.get(f"tokenizer.ggml.{name}_token_id", int)
    return {**config, **_family(facts, hidden, heads, head_dim)}


def _family(facts: Facts, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Keys of config.json beyond the common ones, by architecture."""
    architecture, window = facts.architecture, facts.get("attention.sliding_window", int)
    biased = "blk.0.attn_q.bias" in facts.container.tensors
    if architecture in ("llama", "smollm3"):
        mlp_biased = "blk.0.ffn_up.bias" in facts.container.tensors
        plain = {"hidden_act": "silu", "attention_bias": biased, "mlp_bias": mlp_biased}
        # The file does not state which layers have no RoPE. As in llama.cpp: every fourth.
        return {**plain, "no_rope_layer_interval": 4} if architecture == "smollm3" else plain
    if architecture in ("qwen2", "qwen3"):  # qwen2 always has biases, and no key for them
        stated = {"attention_bias": biased} if architecture == "qwen3" else {}
        return {"hidden_act": "silu", "use_sliding_window": False, **stated}
    if architecture == "phi3":
        original = facts.integer("rope.scaling.original_context_length", facts.integer("context_length"))
        return {"hidden_act": "silu", "sliding_window": window or None, "original_max_position_embeddings": original}
    return _gemma(facts, hidden, heads, head_dim)


def _gemma(facts: Facts, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    layers = facts.integer("block_count")
    if layers > MAX_LAYERS:
        raise facts.bad("block_count", f"has an invalid value: {layers}")
    large = layers == _GEMMA_27B_LAYERS[facts.architecture]
    gemma: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if large else head_dim,
    }
    if facts.architecture == "gemma2":
        return {
            **gemma,
            "sliding_window": facts.integer("attention.sliding_window", 4096),
            "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        }
    caps = "gemma3.final_logit_softcapping" in facts.values
    gemma["final_logit_softcapping"] = facts.number("final_logit_softcapping") if caps else None
    if not facts.get("attention.sliding_window", int):
        return {**gemma, "layer_types": ["full_attention"] * layers}
    return {
        **gemma,
        "sliding_window": facts.integer("attention.sliding_window"),
        "sliding_window_pattern": facts.integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10_000.0),
    }


def _generation_config(facts: Facts) -> dict[str, Any]:
    """Stop tokens (end of sequence, turn and message, as far as stated) and sampling."""
    names = ("eos", "eot", "eom")
    ids = [facts.get(f"tokenizer.ggml.{name}_token_id", int) for name in names]
    stops = list(dict.fromkeys(each for each in ids if each is not None))
    bos = facts.get("tokenizer.ggml.bos_token_id", int)
    config: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": stops} if stops else {"bos_token_id": bos}
    sampling = _sampling(facts)
    return {**config, **sampling, "do_sample": True} if sampling else config


def _sampling(facts: Facts) -> dict[str, Any]:
    """The stored defaults of sampling, unchecked: `sampling.read_generation_config` ignores what means nothing."""
    stated = {name: facts.values.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    return {
        name: shortest_f32(value) if isinstance(value, float) else value
        for name, value in stated.items()
        if value is not None
    }
