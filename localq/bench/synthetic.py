"""Random weights of any architecture, as a checkpoint that the loader reads: no download, and no second way to load.

Big tensors are made on the device, one at a time, each from a seed of its own, so that a 70B in NF4 takes the memory of
its codes and no more. Their scale keeps the residual stream of a hundred layers far from the limits of 16 bit: every
row of a matrix has about unit gain. Tokens mean nothing; the time they take does not depend on the values.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from localq import catalog
from localq.architecture import Architecture
from localq.checkpoint import Checkpoint, TensorInfo, info
from localq.errors import usage_error
from localq.modelfiles import ModelFiles
from localq.models import architecture
from localq.models.layers import RMSNorm
from localq.quant import nf4

FORMATS = ("nf4", "fp16", "bf16")  # what random weights are made in
SCALE_SPREAD = 0.1  # the absmax of blocks lies within this share of their mean
_BIG = 2**16  # elements; smaller tensors are made on the CPU


def config_of(arch: Architecture, dtype: str = "float16") -> dict[str, Any]:
    """A config.json of that shape; what the catalogue does not know (rope, eps, soft caps) is the family's usual."""
    family = "gemma3_text" if arch.model_type == "gemma3" else arch.model_type
    config: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.intermediate,
        "vocab_size": arch.vocab,
        "tie_word_embeddings": arch.tied,
        "max_position_embeddings": arch.max_context,
        "sliding_window": arch.window or None,
        "rms_norm_eps": 1e-6,
        "attention_bias": arch.qkv_bias and arch.output_bias,
        "mlp_bias": arch.mlp_bias,
        "dtype": dtype,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    }
    if family.startswith("gemma"):
        config |= {"query_pre_attn_scalar": arch.head_dim, "hidden_activation": "gelu_pytorch_tanh"}
    if family == "gemma2":
        config |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if family == "phi3":
        config["original_max_position_embeddings"] = arch.max_context
    return config


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """`config` of a model cut to its first `layers` layers; flat, also where the file nests the text part."""
    text = config.get("text_config")
    if isinstance(text, dict):
        flat = {"tie_word_embeddings": config.get("tie_word_embeddings", True), **text}
        config = {**flat, "model_type": f"{config['model_type'].removesuffix('_text')}_text"}
    per_layer = {key: config[key][:layers] for key in ("layer_types", "no_rope_layers") if config.get(key)}
    return {**config, **per_layer, "num_hidden_layers": layers}


def files_of(name: str, dtype: str = "float16") -> tuple[ModelFiles, str]:
    """The files that stand for a catalogued model NAME or NAME@FORMAT on random weights, and the format ("nf4").

    Raises LocalqError: exit 4 for an unknown name, 2 for a format or an architecture that this cannot be done with.
    """
    base, separator, format = name.rpartition("@")
    entry = catalog.find(base if separator else name)
    format = format if separator else "nf4"
    if format not in FORMATS:
        raise usage_error("--synthetic", f"random {format} weights are not made", f"Use one of {', '.join(FORMATS)}.")
    if reason := catalog.not_yet(entry.arch, format):
        raise usage_error("--synthetic", f"{entry.name}: {reason}", "`localq fit` lists others.")
    config = config_of(entry.arch, "bfloat16" if format == "bf16" else dtype)
    label = f"{entry.name}@{format} (random weights)"
    return ModelFiles(path=Path(), kind="safetensors", config=config, name=label), format


def checkpoint(files: ModelFiles, format: str, device: torch.device, seed: int) -> Checkpoint:
    """Random weights for `files`: the block matrices in `format` where it takes them, the rest in 16 bit."""
    family = architecture(files.config)
    with torch.device("meta"):
        model = family.Model(family.Config.from_dict(files.config))
    dtype = nf4.DTYPES[str(files.config.get("dtype", "float16"))]
    quantized = {}
    if format == "nf4":
        quantized = {
            path: (module.out_features, module.in_features)
            for path, module in model.layers.named_modules(prefix="layers")
            if isinstance(module, nn.Linear) and module.in_features % nf4.BLOCK == 0
        }
    norms = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, RMSNorm)}
    dense = {
        name: (tuple(parameter.shape), 1.0 if name in norms else _deviation(name, parameter))
        for name, parameter in model.named_parameters()
        if name.removesuffix(".weight") not in quantized
    }
    tensors = {f"model.{name}": info(dtype, shape) for name, (shape, _) in dense.items()}
    for path, (out, columns) in quantized.items():
        tensors |= {
            f"model.{path}{suffix}": info(kind, shape) for suffix, (kind, shape) in nf4.layout(out, columns).items()
        }
    deviations = {f"model.{name}": scale for name, (_, scale) in dense.items()}
    shapes = {f"model.{path}": shape for path, shape in quantized.items()}
    constant = frozenset(f"model.{name}" for name in norms)
    return Checkpoint(tensors, _Random(tensors, deviations, shapes, constant, device, seed))


def _deviation(name: str, parameter: Tensor) -> float:
    """The standard deviation of a dense tensor: unit rows of the table, unit gain of matrices, small biases."""
    if name == "embed_tokens.weight":
        return 1.0
    return 0.02 if parameter.dim() == 1 else parameter.shape[1] ** -0.5


class _Random:
    """See `checkpoint.Source`: every tensor is made when it is read, and is the same every time."""

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        deviations: Mapping[str, float],
        quantized: Mapping[str, tuple[int, int]],
        norms: frozenset[str],
        device: torch.device,
        seed: int,
    ) -> None:
        """deviations: of the dense tensors; quantized: prefix -> [out, in]; norms: names of what is all ones."""
        self._tensors, self._deviations, self._quantized, self._norms = tensors, deviations, quantized, norms
        self._device, self._seed = device, seed

    def read(self, name: str) -> Tensor:
        """On the device, or on the CPU when small."""
        described = self._tensors[name]
        shape, dtype = described.shape, getattr(torch, described.dtype)
        device = self._device if math.prod(shape) >= _BIG else torch.device("cpu")
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if name in self._norms:
            return torch.ones(shape, dtype=dtype)
        if name in self._deviations:
            return torch.randn(shape, dtype=dtype, device=device, generator=generator).mul_(self._deviations[name])
        prefix, _, suffix = name.rpartition(".weight")
        out, columns = self._quantized[prefix]
        if suffix in ("", ".absmax"):  # every code, and scales over the whole map
            return torch.randint(256, shape, dtype=dtype, device=device, generator=generator)
        if suffix == ".nested_absmax":  # the map spans -1 to 1
            return torch.full(shape, SCALE_SPREAD * unit_absmax(columns), dtype=dtype)
        return _constants(out, columns)[name.removeprefix(prefix)]

    def close(self) -> None:
        """Nothing is open."""


def unit_absmax(columns: int) -> float:
    """The absmax at which a row of uniformly random NF4 codes has unit gain."""
    return 1 / (math.sqrt(columns) * float(nf4.CODE_MAP.square().mean().sqrt()))


def _constants(out: int, columns: int) -> dict[str, Tensor]:
    """Suffix -> the parts of an NF4 matrix that are not random: as the format writes them, for another shape."""
    one = nf4.Packed(
        codes=torch.zeros(1, nf4.BLOCK // 2, dtype=torch.uint8),
        absmax=torch.zeros(1, dtype=torch.uint8),
        nested_absmax=torch.zeros(1),
        nested_map=nf4.dynamic_map(),
        offset=torch.tensor(unit_absmax(columns)),
        shape=(1, nf4.BLOCK),
        dtype=torch.float16,
    )
    tensors = nf4.to_tensors(one, "")
    state = json.loads(tensors[nf4.STATE_SUFFIX].numpy().tobytes())
    text = json.dumps({**state, "shape": [out, columns]}).encode().ljust(nf4.STATE_BYTES)
    return {**tensors, nf4.STATE_SUFFIX: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
