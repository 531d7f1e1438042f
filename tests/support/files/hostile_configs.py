"""Configurations that no model has (reliability M3), as changes of one field and as cases over a sound folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.files.hostile_models import CONFIG, Case, Change

# One field that is refused wherever it stands: by `model_folder.check_config`, before anything else looks.
FIELDS: list[dict[str, Any]] = [
    {"hidden_size": 2**40},
    {"hidden_size": 0},
    {"hidden_size": -64},
    {"hidden_size": 64.0},
    {"hidden_size": "64"},
    {"hidden_size": True},
    {"hidden_size": [64]},
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": 0},
    {"num_attention_heads": 0},
    {"num_key_value_heads": 0},
    {"num_key_value_heads": 3},
    {"num_key_value_heads": 8},
    {"head_dim": 10**6},
    {"vocab_size": 2**20 + 1},
    {"intermediate_size": -1},
    {"num_experts": 513},
    {"num_local_experts": -1},
    {"experts_per_token": "4"},
    {"num_experts_per_tok": 513},
    {"max_position_embeddings": 2**60},
    {"original_max_position_embeddings": -1},
    {"sliding_window": -5},
    {"max_window_layers": "28"},
    {"rope_theta": 0},
    {"rope_theta": -1e4},
    {"rope_theta": 1e300},
    {"rope_theta": "1e4"},
    {"rope_theta": float("nan")},
    {"rms_norm_eps": 0},
    {"rms_norm_eps": True},
    {"partial_rotary_factor": -0.5},
    {"query_pre_attn_scalar": float("inf")},
    {"layer_types": 5},
    {"layer_types": "sliding_attention"},
    {"layer_types": {"sliding_attention": 1}},
    {"layer_types": [["sliding_attention"]]},
    {"layer_types": ["full_attention"] * 257},
    {"quantization_config": "nf4"},
    {"quantization_config": [1]},
]
TEXTS = {  # instead of the whole file
    "list": "[]", "null": "null", "number": "7", "cut": "{", "empty": "", "byte order mark": "\ufeff{}",
    "NaN": '{"model_type": "llama", "x": NaN}', "Infinity": '{"model_type": "llama", "x": -Infinity}',
    "key twice": '{"model_type": "llama", "model_type": "qwen3"}', "deep list": "[" * 100_000,
    "deep object": '{"a":' * 100_000, "no model type": "{}", "model type is a number": '{"model_type": 3}',
    "text part is a list": '{"model_type": "llama", "text_config": []}',
    "long integer": '{"hidden_size": ' + "9" * 5000 + "}",
}  # fmt: skip
NESTED = {"model_type": "llama", "text_config": {"model_type": "llama", "hidden_size": 2**40}}
ROPES: dict[str, Any] = {
    "text": "llama3",
    "list": [1],
    "no factor": {"rope_type": "linear"},
    "factor 0": {"rope_type": "linear", "factor": 0},
    "factor of text": {"rope_type": "linear", "factor": "8"},
    "factor beyond floats": {"rope_type": "linear", "factor": 10**400},
    "theta 0": {"rope_type": "default", "rope_theta": 0},
    "borders crossed": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1},
    "original context 0": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0},
    "original context vast": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 2**60},
    "slope of text": {"rope_type": "yarn", "factor": 4, "beta_fast": "32"},
    "no divisors": {"rope_type": "longrope"},
    "divisors too few": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8},
    "divisors of zero": {"rope_type": "longrope", "short_factor": [0] * 8, "long_factor": [1.0] * 8},
    "divisors of text": {"rope_type": "longrope", "short_factor": ["1"] * 8, "long_factor": [1.0] * 8},
}
# Within the limits, and not what the tensors are: found by name and shape, before memory is taken.
OTHER_SHAPES: list[dict[str, Any]] = [
    {"hidden_size": 65_536, "intermediate_size": 2**20, "num_attention_heads": 1024, "num_key_value_heads": 1024},
    {"hidden_size": 128},
    {"intermediate_size": 2**20},
    {"num_hidden_layers": 256},
    {"num_hidden_layers": 2},
    {"vocab_size": 2**20},
    {"vocab_size": 321},
    {"head_dim": 1024},
    {"num_attention_heads": 8, "head_dim": 16},
    {"num_key_value_heads": 4},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"tie_word_embeddings": "yes"},
    {"model_type": "qwen3"},
    {"model_type": "phi3"},
    {"model_type": "gemma2"},
    {"num_attention_heads": 1024, "num_key_value_heads": 1024},
    {"num_attention_heads": 6, "num_key_value_heads": 2},
]
NAMED = [  # what some model has and this version does not compute: exit 1
    {"model_type": "mamba"},
    {"model_type": "\u202e\x9b31m"},
    {"hidden_act": "softmax"},
    {"hidden_act": "\x1b]52;c;x\x07" * 100_000},
    {"hidden_act": ["silu"]},
    {"attention_chunk_size": 8192},
    {"rope_scaling": {"rope_type": "ntk"}},
    {"rope_scaling": {"rope_type": ["llama3"]}},
    {"rope_scaling": {"mrope_section": [1, 2, 3]}},
    {"quantization_config": {"quant_method": "gptq"}},
    {"quantization_config": {"quant_method": ["x" * 2**20]}},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
]


def with_config(text: str) -> Change:
    return lambda folder: (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))


def changed(fields: dict[str, Any]) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return change


def _without(name: str) -> Change:
    return with_config(json.dumps({key: value for key, value in CONFIG.items() if key != name}))


def _title(fields: dict[str, Any]) -> str:
    return f"{fields!r:.70}"


CASES = [
    *(Case(f"M3 {_title(fields)}", changed(fields)) for fields in FIELDS),
    *(Case(f"M3 file: {name}", with_config(text)) for name, text in TEXTS.items()),
    *(Case(f"M3 without {name}", _without(name)) for name in
      ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
       "max_position_embeddings")),
    Case("M3 a text part out of bounds", with_config(json.dumps(NESTED))),
    Case("M3 not UTF-8", lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{}")),
    Case("M3 9 MB", with_config(json.dumps({**CONFIG, "x": " " * 9 * 10**6}))),
    Case("M3 half a character", changed({"x": "\ud800"})),
    Case("M3 a million numbers", changed({"x": [0] * 1_100_000})),
    Case("M3 no file", lambda folder: (folder / "config.json").unlink()),
    Case("M3 theta 1e999", with_config(json.dumps(CONFIG).replace("10000.0", "1e999"))),
    *(Case(f"M3 rope: {name}", changed({"rope_scaling": rope})) for name, rope in ROPES.items()),
    *(Case(f"M3 tensors differ: {_title(fields)}", changed(fields)) for fields in OTHER_SHAPES),
    *(Case(f"M3 {format} tensors differ: {_title(fields)}", changed(fields), format=format)
      for format in ("nf4", "aqlm", "vptq", "vq2")
      for fields in ({"intermediate_size": 2**20}, {"num_attention_heads": 1024, "num_key_value_heads": 1024})),
    *(Case(f"M3 not supported: {_title(fields)}", changed(fields), 1) for fields in NAMED),
    *(Case(f"M3 {name} is {content[:9]!r}", lambda folder, name=name, content=content:
           (folder / name).write_text(content))
      for name in ("generation_config.json", "tokenizer_config.json")
      for content in ("[1]", "[" * 100_000, '{"temperature": NaN}')),
]  # fmt: skip
