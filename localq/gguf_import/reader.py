"""A .gguf file as if it were a Hugging Face folder: configuration, stop tokens, chat template, tensors by their names.

Torch-free and numpy-free; the data itself is read by `tensors.py`, the vocabulary by `vocab.py`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq.errors import ExitCode, LocalqError, bad_file
from localq.gguf_import.binary import Container, RawTensor, read_container
from localq.gguf_import.names import ARCHITECTURES, hugging_face_name, is_frequency_tensor

_F32 = 0
# llama.cpp derives gemma's query scale from the size of the model, as the file has no key for it: the 27B models of
# both generations (by their layer count) use hidden / heads, the others head_dim.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_LLAMA3_ORIGINAL = 8192  # positions of Llama 3's pretraining; low and high frequency factors are 1 and 4


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies: its GGUF name, ggml's type number, the Hugging Face shape, the offset in the file."""

    gguf_name: str
    type: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class GgufModel:
    """The header of a model. `tensors` is keyed by Hugging Face names; `architecture` is GGUF's."""

    path: Path
    architecture: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    chat_template: str | None
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufModel:
    """Read and check `path`. Raises LocalqError: exit 8 for a damaged file, 1 for what is not supported, by name."""
    container = read_container(path)
    facts = _Facts(container)
    if facts.values.get("split.count", 1) not in (0, 1):
        why = f"it is one of {facts.values['split.count']} parts"
        raise LocalqError(str(path), why, "Merge the parts first (`llama-gguf-split --merge`).", ExitCode.FAILURE)
    if facts.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise LocalqError(
            str(path), f"its architecture '{facts.architecture}' is not supported", f"Supported: {known}."
        )
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
    )


class _Facts:
    """Typed access to the metadata, with errors that name the key."""

    def __init__(self, container: Container) -> None:
        self.container, self.values = container, container.values
        self.architecture = str(self.values.get("general.architecture"))

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None, required: bool = False) -> Any:
        """The value of `<architecture>.<key>` (or of `key` if it has a known prefix), checked."""
        full = key if key.startswith(("tokenizer.", "general.")) else f"{self.architecture}.{key}"
        value = self.values.get(full, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]  # some writers give one value per layer
        if value is None and not required:
            return None
        if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
            why = "is missing" if value is None else f"has the value {str(value)[:40]!r}"
            raise bad_file(str(self.container.path), f"the key {full} {why}", "The file is damaged; fetch it again.")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.get(key, int, default, required=True))

    def number(self, key: str, default: float | None = None) -> float | None:
        """A float; stored as f32, and so given in its shortest spelling (1e-05 rather than 9.99999974e-06)."""
        value = self.get(key, (int, float), default)
        return None if value is None else shortest_f32(float(value))


def shortest_f32(value: float) -> float:
    """The shortest decimal that rounds to the same f32: what the writer meant by it."""
    for digits in range(6, 10):
        text = float(f"{value:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", text))[0] == value:
            return text
    return value


def _tensors(container: Container, architecture: str) -> dict[str, GgufTensor]:
    found = {}
    for name, raw in container.tensors.items():
        if is_frequency_tensor(name):
            continue
        renamed = hugging_face_name(architecture, name)
        if renamed is None:
            why = f"it has a tensor {name!r} that {architecture} models do not have"
            raise LocalqError(str(container.path), why, "This variant is not supported.", ExitCode.FAILURE)
        found[renamed] = GgufTensor(name, raw.type, raw.shape, raw.offset)
    return found


def _config(facts: _Facts, tied: bool) -> dict[str, Any]:
    heads, hidden = facts.integer("attention.head_count"), facts.integer("embedding_length")
    head_dim = facts.integer("attention.key_length", hidden // max(heads, 1))
    embedding = facts.container.tensors.get("token_embd.weight")
    if embedding is None:
        raise bad_file(str(facts.container.path), "it has no token_embd.weight", "Fetch the file again.")
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
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": facts.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(facts, rotary),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = facts.get(f"tokenizer.ggml.{name}_token_id", int)
    return {**config, **_family(facts, hidden, heads, head_dim)}


def _family(facts: _Facts, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """What the architecture states beyond the common keys."""
    architecture, window = facts.architecture, facts.get("attention.sliding_window", int)
    if architecture in ("llama", "smollm3"):
        biased = "blk.0.attn_q.bias" in facts.container.tensors
        mlp_biased = "blk.0.ffn_up.bias" in facts.container.tensors
        return {"hidden_act": "silu", "attention_bias": biased, "mlp_bias": mlp_biased}
    if architecture in ("qwen2", "qwen3"):
        return {"hidden_act": "silu", "use_sliding_window": False}
    if architecture == "phi3":
        original = facts.integer("rope.scaling.original_context_length", facts.integer("context_length"))
        return {"hidden_act": "silu", "sliding_window": window or None, "original_max_position_embeddings": original}
    large = facts.integer("block_count") == _GEMMA_27B_LAYERS[architecture]
    gemma = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window or 4096,
        "query_pre_attn_scalar": hidden // heads if large else head_dim,
    }
    if architecture == "gemma3":
        return {**gemma, "sliding_window_pattern": 6, "rope_local_base_freq": 10_000.0}
    caps = {
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
    }
    return {**gemma, **caps}


def _rope_scaling(facts: _Facts, rotary: int) -> dict[str, Any] | None:
    tensors, kind = facts.container.tensors, facts.values.get(f"{facts.architecture}.rope.scaling.type")
    if "rope_factors_long.weight" in tensors and "rope_factors_short.weight" in tensors:
        return {
            "rope_type": "longrope",
            "long_factor": _floats(facts.container, tensors["rope_factors_long.weight"]),
            "short_factor": _floats(facts.container, tensors["rope_factors_short.weight"]),
        }
    frequencies = tensors.get("rope_freqs.weight") or tensors.get("blk.0.rope_freqs.weight")
    if frequencies is not None:
        return _llama3(facts, rotary, _floats(facts.container, frequencies))
    if kind in (None, "none"):
        return None
    factor = facts.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = facts.integer("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise LocalqError(str(facts.container.path), f"its RoPE scaling {kind!r} is not supported", "Use another file.")


def _llama3(facts: _Facts, rotary: int, stored: list[float]) -> dict[str, Any] | None:
    """GGUF stores what Llama 3's scaling divides each frequency by; the parameters are found again and checked."""
    factor = round(max(stored), 3)
    if factor == 1.0:
        return None
    theta = facts.number("rope.freq_base", 10_000.0) or 10_000.0
    for index, divisor in enumerate(stored):
        turns = _LLAMA3_ORIGINAL * theta ** (-2 * index / rotary) / (2 * math.pi)
        keep = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
        expected = 1.0 / ((1.0 - keep) / factor + keep)
        if not math.isclose(divisor, expected, rel_tol=1e-4):
            why = "its rope_freqs.weight follows no scaling that is known"
            raise LocalqError(str(facts.container.path), why, "Use another file of this model.", ExitCode.FAILURE)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _floats(container: Container, tensor: RawTensor) -> list[float]:
    """The values of a small f32 tensor."""
    count = math.prod(tensor.shape)
    if tensor.type != _F32 or count > 2**16 or tensor.offset + 4 * count > container.size:
        raise bad_file(str(container.path), "a tensor of RoPE factors is malformed", "Fetch the file again.")
    with container.path.open("rb") as file:
        file.seek(tensor.offset)
        return [shortest_f32(value) for value in struct.unpack(f"<{count}f", file.read(4 * count))]


def _generation_config(facts: _Facts) -> dict[str, Any]:
    """Stop tokens: end of sequence, and the end of turn and of message where the file names them."""
    names = ("eos", "eot", "eom")
    ids = [facts.get(f"tokenizer.ggml.{name}_token_id", int) for name in names]
    stops = list(dict.fromkeys(each for each in ids if each is not None))
    bos = facts.get("tokenizer.ggml.bos_token_id", int)
    return {"bos_token_id": bos, "eos_token_id": stops} if stops else {"bos_token_id": bos}
