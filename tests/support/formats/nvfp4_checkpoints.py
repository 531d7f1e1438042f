"""Tiny models in NVFP4 as compressed-tensors and as ModelOpt store them, alone or beside FP8; and what they are.

Codes and scales are random. `decompressed` is the package of compressed-tensors; `of_modelopt` the formula of
ModelOpt's NVFP4QTensor in words of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.formats import expert_checkpoints
from tests.support.models.tiny_checkpoints import make_checkpoint

WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
           "dynamic": False}  # fmt: skip
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
NVFP4 = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None, "format": "nvfp4-pack-quantized"}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": NVFP4},
    "ignore": ["lm_head"],
}  # fmt: skip
WITH_FP8 = {
    **COMPRESSED, "format": "mixed-precision",
    "config_groups": {"group_0": NVFP4, "group_1": {"targets": ["re:.*self_attn.*"], "weights": FP8_WEIGHTS,
                                                    "format": "float-quantized"}},
}  # fmt: skip
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
MIXED = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
                         "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}},
}  # fmt: skip
CONFIGS = {"compressed": COMPRESSED, "compressed with fp8": WITH_FP8, "modelopt": MODELOPT, "modelopt mixed": MIXED}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def tensors(shape: tuple[int, int], program: str, seed: int = 0) -> dict[str, Tensor]:
    """Suffix -> random tensor of a matrix [out, in] whose weights have a deviation of about 0.1."""
    (out, columns), generator = shape, torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (out, columns // 2), generator=generator, dtype=torch.uint8)
    scales = (200 * torch.rand(out, columns // 16, generator=generator)).to(torch.float8_e4m3fn)
    factor = 3e-4 * (1 + torch.rand(1, generator=generator))
    if program == "compressed":
        return {".weight_packed": codes, ".weight_scale": scales, ".weight_global_scale": 1 / factor,
                ".input_global_scale": torch.ones(1)}  # fmt: skip
    return {".weight": codes, ".weight_scale": scales, ".weight_scale_2": factor.reshape(()),
            ".input_scale": torch.ones(())}  # fmt: skip


def reference(made: dict[str, Tensor]) -> Tensor:
    """The weights in bf16, as each program has them."""
    return of_modelopt(made) if ".weight_scale_2" in made else decompressed(made)


def decompressed(made: dict[str, Tensor]) -> Tensor:
    """By the package."""
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    held = {name.removeprefix("."): each for name, each in made.items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=WEIGHTS)
    weight: Tensor = NVFP4PackedCompressor.decompress(held, scheme)["weight"]
    return weight


def of_modelopt(made: dict[str, Tensor]) -> Tensor:
    """Code by code: value of E2M1 times (scale of the group times that of the matrix), in f32."""
    scales = made[".weight_scale"].float() * made[".weight_scale_2"].float()
    rows = []
    for row in made[".weight"].tolist():
        codes = [code for byte in row for code in (byte & 15, byte >> 4)]
        rows.append([(-1.0 if code & 8 else 1.0) * E2M1[code & 7] for code in codes])
    values = torch.tensor(rows)
    return (values.view(len(values), -1, 16) * scales[:, :, None]).flatten(1).bfloat16()


def fp8(shape: tuple[int, int], program: str, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix in FP8: with a scale for each row, of ModelOpt one for all; and its weights in bf16."""
    generator = torch.Generator().manual_seed(seed)
    codes = (100 * torch.randn(shape, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = 1e-3 * (1 + torch.rand((shape[0], 1) if program == "compressed" else (), generator=generator))
    return {".weight": codes, ".weight_scale": scales}, (codes.float() * scales).bfloat16()


def write(folder: Path, kind: str, model_type: str = "llama", **overrides: Any) -> tuple[Path, Path]:
    """(a tiny model in that of `CONFIGS`, the same dequantized to bf16), in `folder`."""
    program, with_fp8 = kind.split()[0], len(kind.split()) > 1
    layers = 2 if "moe" in model_type else 1
    source = make_checkpoint(folder / "source", model_type, num_hidden_layers=layers, **overrides)
    plain = expert_checkpoints.read(source)
    stored = dict(plain)
    for number, (name, weight) in enumerate(sorted(plain.items())):
        prefix, shape = name.removesuffix(".weight"), (weight.shape[0], weight.shape[-1])
        if not expert_checkpoints.LINEAR.fullmatch(name):
            continue
        del stored[name]
        if with_fp8 and "self_attn" in name:
            made, plain[name] = fp8(shape, program, number)
        else:
            made = tensors(shape, program, number)
            plain[name] = reference(made)
        stored |= {prefix + suffix: each for suffix, each in made.items()}
    packed = expert_checkpoints.write(folder / "packed", stored, source, quantization_config=CONFIGS[kind])
    return packed, expert_checkpoints.write(folder / "plain", plain, source)
