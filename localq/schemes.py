"""Which variant of its format a model on the disk is in, in the catalogue's words: "2x8g8", "v8-k65536-0". Torch-free.

For estimates: the first matrix in the format speaks for all. Loading looks at every one.
"""

from __future__ import annotations

from typing import Any

from localq.modelfiles import ModelFiles
from localq.safetensors_header import read_header, shard_paths

LARGEST = 2**16  # entries of a codebook, weights of a codeword


def scheme_of(files: ModelFiles) -> str:
    """Empty for formats without variants, and where the files do not tell. A bad header is a LocalqError (exit 8)."""
    method = files.quantization.get("quant_method")
    if method == "aqlm":
        return _aqlm(files)
    return _vptq(files.quantization) if method == "vptq" else ""


def _aqlm(files: ModelFiles) -> str:
    """By the shape of a codebook: [books, entries, rows of a group, columns of a group]."""
    for path in shard_paths(files.path).values():
        shapes = (each.shape for name, each in read_header(path).tensors.items() if name.endswith(".codebooks"))
        for shape in shapes:
            if len(shape) == 4 and all(0 < size <= LARGEST for size in shape):
                books, entries, rows, columns = shape
                return f"{books}x{(entries - 1).bit_length()}g{rows * columns}"
    return ""


def _vptq(quantization: dict[str, Any]) -> str:
    """By what config.json says of a matrix: [of outliers, of the rest] for each of three sizes."""
    layers = quantization.get("config_for_layers")
    said = next(iter(layers.values()), None) if isinstance(layers, dict) else None
    if not isinstance(said, dict):
        return ""
    pairs = [said.get(key) for key in ("vector_lens", "num_centroids", "num_res_centroids")]
    sizes = [pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2 and type(pair[1]) is int]
    if len(sizes) != 3 or not all(0 < size <= LARGEST for size in sizes[:2]) or sizes[2] > LARGEST:
        return ""
    return f"v{sizes[0]}-k{sizes[1]}-{max(sizes[2], 0)}"
