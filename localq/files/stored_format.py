"""The format of a model's files: name, scheme, and variants that localq does not read. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from localq.files import format_facts
from localq.files.architecture import Architecture
from localq.files.gguf import packing, reader
from localq.files.model_folder import ModelFiles
from localq.files.safetensors_headers import read_header, shard_paths
from localq.files.schemes import Shapes

UNKNOWN = "unknown"
# Formats that localq does not read -> what to use
INSTEAD = {"exl3": "Use a GGUF version of this model, or quantize its 16-bit weights to vq2."}
_OF_HEADERS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}  # dtypes of safetensors headers
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def format_of_config(config: dict[str, Any]) -> str:
    """The format of a config.json: that of its quantization, else its dtype."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict) and quantization:
        method = str(quantization.get("quant_method", UNKNOWN))
        if method == "bitsandbytes":
            return str(quantization.get("bnb_4bit_quant_type", "fp4")) if quantization.get("load_in_4bit") else "int8"
        known = format_facts.of_method(method)
        return known.name if known else method.removeprefix("localq_")  # "fp8" too
    inner = config.get("text_config")
    parts = (config, inner if isinstance(inner, dict) else {})
    named = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return next((_DTYPES[name] for name in named if isinstance(name, str) and name in _DTYPES), UNKNOWN)


def format_of_files(files: ModelFiles) -> str:
    """The format of a model folder: that of config.json, else the dtype of most elements of its matrices."""
    format = format_of_config(files.config)
    if format != UNKNOWN or files.quantization:
        return format
    sizes = dict.fromkeys(_OF_HEADERS, 0)
    for path in shard_paths(files.path).values():
        for each in read_header(path).tensors.values():
            if each.dtype in sizes and len(each.shape) > 1:
                sizes[each.dtype] += math.prod(each.shape)
    largest = max(sizes, key=lambda dtype: sizes[dtype])
    return _OF_HEADERS[largest] if sizes[largest] else UNKNOWN


def scheme_of(files: ModelFiles) -> str:
    """The scheme of a model on the disk: "2x8g8", "s4l16".

    Of GGUF the type of its blocks, or "mix4.85" (`gguf.packing.scheme`). Empty for formats without schemes, and if the
    files state none. Raises LocalqError (exit 8) for a bad header.
    """
    if files.kind == "gguf":
        return packing.scheme(reader.read_header(files.path))
    format = format_facts.of_method(files.quantization.get("quant_method"))
    if format is None:
        return ""
    if format.scheme_of_tensors is not None:
        return format.scheme_of_tensors(_shapes(files), files.config)
    return format.scheme_of_config(files.quantization)


def scheme_in(files: ModelFiles, shapes: Shapes) -> str:
    """The scheme of a model with codebooks, from the shapes of all its tensors; empty for other formats."""
    format = format_facts.of_method(files.quantization.get("quant_method"))
    if format is None or format.scheme_of_tensors is None or not format.has_codebooks:
        return ""
    return format.scheme_of_tensors(shapes, files.config)


def _shapes(files: ModelFiles) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of the files."""
    headers = (read_header(path).tensors for path in shard_paths(files.path).values())
    return {name: each.shape for tensors in headers for name, each in tensors.items()}


def unreadable(quantization: Mapping[str, Any]) -> str:
    """The variant of these files in a few words, if localq does not read it; empty if it does."""
    if quantization.get("quant_method") == "fp8" and quantization.get("expert_dtype") not in (None, "fp8"):
        return f"FP8 with experts in {str(quantization['expert_dtype'])[:20].upper()}"
    format = format_facts.of_method(quantization.get("quant_method"))
    return format.unreadable(quantization) if format else ""


def only_experts(files: ModelFiles) -> bool:
    """Return whether only the experts of a mixture are quantized (MXFP4). A conversion copies these unchanged."""
    format = format_facts.of_method(files.quantization.get("quant_method"))
    return format is not None and format.experts_only and Architecture.from_config(files.config).experts > 0


def stored_head(files: ModelFiles) -> int:
    """`Architecture.stored_head` of a model on the disk."""
    return packing.head_bytes(reader.read_header(files.path)) if files.kind == "gguf" else 0


def block_bytes(files: ModelFiles) -> int | None:
    """Exact bytes on a GPU of a GGUF model without embedding and head; None for other files."""
    return packing.device_bytes(reader.read_header(files.path)) if files.kind == "gguf" else None
