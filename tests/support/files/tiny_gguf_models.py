"""A tiny random llama as a .gguf file that a conversation could use: weights of model size, and a vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from tests.support.files.tiny_gguf import SHAPE, Case, converted, finish, model, write_keys

CASE = Case("llama", "llama", {"head_dim": 16, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2})


def write_with_tokenizer(path: Path, kind: str, **options: Any) -> Path:
    """Matrices as `kind`. Tokens: three special ones, and bytes. options: of the package's writer."""
    writer = gguf.GGUFWriter(path, CASE.architecture, **options)
    write_keys(writer, CASE)
    count = SHAPE["vocab_size"]
    tokens = ["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet())[: count - 4], "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (count - 3)])
    writer.add_token_merges(["a b"])
    weights = {name: 0.04 * each.numpy() if each.dim() > 1 else 1 + 0.02 * each.numpy()
               for name, each in model(CASE).state_dict().items()}  # fmt: skip
    for name, values in converted(CASE, weights):
        stored = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        values = np.ascontiguousarray(values, np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    finish(writer)
    return path
