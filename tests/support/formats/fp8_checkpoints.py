"""Rewrites a checkpoint in 16 or 32 bit as FP8, in the layout that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localq.files.safetensors_headers import SINGLE_NAME

LARGEST = 448.0  # of e4m3
PLAIN = tuple(f"{each}.weight" for each in (".gate", ".conv1d", ".in_proj_a", ".in_proj_b", ".shared_expert_gate"))


def quantize(weight: Tensor, block: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """weight [..., out, in] -> e4m3 of the same shape, and f32 scales [..., blocks, blocks], or [] for block None."""
    if block is None:
        scale = weight.abs().amax().float() / LARGEST
        return (weight.float() / scale).to(torch.float8_e4m3fn), scale
    rows, columns = weight.shape[-2:]
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scales = torch.empty(*weight.shape[:-2], *grid)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(grid[0]):
        for j in range(grid[1]):
            place = (..., slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            part = weight[place].float()
            scale = part.abs().amax((-2, -1)) / LARGEST
            scales[..., i, j] = scale
            codes[place] = (part / scale[..., None, None]).to(torch.float8_e4m3fn)
    return codes, scales


def reference(codes: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Element by element, in f64."""
    if block is None:
        return codes.double() * scales.double()
    rows, columns = codes.shape[-2:]
    i, j = torch.arange(rows) // block[0], torch.arange(columns) // block[1]
    return codes.double() * scales.double()[..., i[:, None], j[None]]


def rewrite(folder: Path, block: tuple[int, int] | None = (128, 128), activations: bool = False) -> None:
    """Store the matrices of the layers as FP8, and in `plain` beside the folder what they dequantize to."""
    tensors, plain = load_file(folder / SINGLE_NAME), {}
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or ".layers." not in name or name.endswith(PLAIN):
            stored[name] = plain[name] = tensor
            continue
        codes, scales = quantize(tensor, block)
        stored[name], stored[f"{name}_scale_inv"] = codes, scales
        if activations:
            stored[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(0.5)
        plain[name] = reference(codes, scales, block).bfloat16()
    sibling = folder.with_name(f"{folder.name}-plain")
    sibling.mkdir()
    for path in folder.iterdir():
        (sibling / path.name).write_bytes(path.read_bytes())
    save_file(plain, sibling / SINGLE_NAME, {"format": "pt"})
    save_file(stored, folder / SINGLE_NAME, {"format": "pt"})
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "static" if activations else "dynamic",
        "weight_block_size": None if block is None else list(block), "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
