"""Repositories that no catalogue lists, as files: a llama in two shards of zeros, and one as a .gguf file."""

from __future__ import annotations

import json
import struct

from tests.support.files import fake_hub

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 8192, "dtype": "bfloat16",
}  # fmt: skip


def shard(tensors: dict[str, list[int]]) -> bytes:
    """A sound safetensors file of bf16 zeros."""
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(at)


def model(config: dict | None = None) -> dict[str, bytes]:
    first = shard({"model.embed_tokens.weight": [320, 64], "model.layers.0.self_attn.q_proj.weight": [64, 64]})
    rest = {f"model.layers.1.mlp.{name}.weight": [4000, 640] for name in ("up_proj", "down_proj", "gate_proj")}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {"model.embed_tokens.weight": names[0], "model.layers.0.self_attn.q_proj.weight": names[0]}
    weight_map |= dict.fromkeys(rest, names[1])
    return {
        **fake_hub.model_files(), "config.json": json.dumps(config or CONFIG).encode(), names[0]: first,
        names[1]: shard(rest), "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
    }  # fmt: skip


def gguf(tokens: int, values: int = 4096) -> bytes:
    """A llama of two layers whose header holds `tokens` tokens; weights of 32-bit zeros."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def key(name: str, kind: int, value: bytes) -> bytes:
        return text(name) + struct.pack("<I", kind) + value

    sizes = {"block_count": 2, "context_length": 8192, "embedding_length": 64, "feed_forward_length": 96}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    keys = [key("general.architecture", 8, text("llama"))]
    keys += [key(f"llama.{name}", 4, struct.pack("<I", size)) for name, size in sizes.items()]
    keys.append(key("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)))
    words = b"".join(text(f"token {i:010d}") for i in range(tokens))
    keys.append(key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, tokens) + words))
    directory = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 64, values, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys)) + b"".join(keys) + directory
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + bytes(4 * 64 * values)
