"""A sound model folder of a few kilobytes, and cases that each break one thing in it.

The folder is written without transformers. `cases()` is the whole corpus of reliability M1 to M6; `hostile_drive.py`
takes each case through the product as `localq show` and `localq run` would.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Change = Callable[[Path], object]
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 256, "eos_token_id": 258,
}  # fmt: skip
LAYER = "model.layers.0."
LINEARS = {
    f"{LAYER}self_attn.q_proj": (64, 64), f"{LAYER}self_attn.k_proj": (32, 64), f"{LAYER}self_attn.v_proj": (32, 64),
    f"{LAYER}self_attn.o_proj": (64, 64), f"{LAYER}mlp.gate_proj": (128, 64), f"{LAYER}mlp.up_proj": (128, 64),
    f"{LAYER}mlp.down_proj": (64, 128),
}  # fmt: skip
QUERY = f"{LAYER}self_attn.q_proj"
FORMATS = ("plain", "nf4", "aqlm", "vptq", "vq2", "awq", "gptq", "bcq", "mixture")  # a mixtral in NF4
MIXTURE = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 3}
ROUTER, EXPERTS = f"{LAYER}block_sparse_moe.gate.weight", f"{LAYER}block_sparse_moe.experts"


@dataclass(frozen=True)
class Case:
    """One malformed model: `change` breaks a sound folder of `format`; then `exit_code` must be the answer.

    exit_code 8 (a bad file), or 1 for what is named as not supported; 0: the bad part is unused, and the folder loads
    """

    name: str
    change: Change
    exit_code: int = 8
    format: str = "plain"


def cases() -> list[Case]:
    """All of them."""
    from tests.support.files import hostile_configs, hostile_headers, hostile_quantized, hostile_tokenizer_files

    return [
        *hostile_headers.CASES, *hostile_configs.CASES, *hostile_quantized.CASES, *hostile_tokenizer_files.CASES
    ]  # fmt: skip


def write_sound(folder: Path, format: str = "plain") -> Path:
    """The sound model, its Linears in `format`."""
    made = _sound(format)
    folder.mkdir(parents=True)
    for name, content in made.items():
        (folder / name).write_bytes(content)
    return folder


@functools.cache
def _sound(format: str) -> dict[str, bytes]:
    """File name -> content; made once, because the thousand cases that change a file need it unchanged."""
    import tempfile

    from tests.support.models.tiny_checkpoints import write_tokenizer

    folder = Path(tempfile.mkdtemp())
    try:
        tensors, quantization = sound_tensors(format)
        write_tensors(folder, tensors)
        config = CONFIG | (MIXTURE if format == "mixture" else {})
        config |= {"quantization_config": quantization} if quantization else {}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}))
        write_tokenizer(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}
    finally:
        shutil.rmtree(folder)


def write_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """model.safetensors with these tensors."""
    from safetensors.torch import save_file

    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@functools.cache
def sound_tensors(format: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensor by name, quantization_config) of the sound model; not to be changed."""
    import torch

    generator = torch.Generator().manual_seed(4)
    held = {
        "model.embed_tokens.weight": torch.randn(320, 64, generator=generator),
        "model.norm.weight": torch.ones(64),
        f"{LAYER}input_layernorm.weight": torch.ones(64),
        f"{LAYER}post_attention_layernorm.weight": torch.ones(64),
        "lm_head.weight": torch.randn(320, 64, generator=generator),
    }
    said: dict[str, Any] = {}
    linears = LINEARS
    if format == "mixture":
        format, held[ROUTER] = "nf4", torch.randn(3, 64, generator=generator)
        linears = {path: shape for path, shape in LINEARS.items() if ".mlp." not in path}
        shapes = {"w1": (128, 64), "w2": (64, 128), "w3": (128, 64)}
        linears |= {f"{EXPERTS}.{expert}.{part}": shape for expert in range(3) for part, shape in shapes.items()}
    for path, shape in linears.items():
        weight = 0.1 * torch.randn(shape, generator=generator)
        tensors, config = _linear(format, path, weight)
        held |= tensors
        said.setdefault("config_for_layers", {})[path] = config
    return held, _quantization(format, said)


def _linear(format: str, path: str, weight: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    shape = tuple(weight.shape)
    if format == "nf4":
        from localq.formats import nf4

        return nf4.to_tensors(nf4.quantize(weight), path), {}
    if format == "aqlm":
        from tests.support.formats import aqlm_checkpoints

        made = aqlm_checkpoints.tensors(shape, aqlm_checkpoints.LAYOUTS["2x8g8"], weight.half().dtype)
        return {path + suffix: tensor for suffix, tensor in made.items()}, {}
    if format == "vptq":
        from tests.support.formats import vptq_layers

        layer = vptq_layers.make(vptq_layers.Layout((8, 256, 16), *shape))
        return {path + suffix: tensor for suffix, tensor in layer.tensors.items()}, layer.config
    if format == "vq2":
        from localq.formats.codebooks import vq2
        from tests.support.formats import vq2_checkpoints

        return vq2.to_tensors(vq2_checkpoints.packed_of(shape), path), {}
    if format == "bcq":
        from localq.formats import bcq

        return bcq.to_tensors(bcq.quantize(weight, 2, 32, zero_point=True), path), {}
    if format in ("awq", "gptq"):
        from tests.support.formats import int4_checkpoints

        made = int4_checkpoints.tensors(shape, int4_checkpoints.Int4(format, 32, act_order=format == "gptq"))
        return {path + suffix: tensor for suffix, tensor in made.items()}, {}
    return {f"{path}.weight": weight}, {}


def _quantization(format: str, said: dict[str, Any]) -> dict[str, Any]:
    from localq.formats import bcq, nf4
    from localq.formats.codebooks import vq2

    if format == "bcq":
        return bcq.quantization_config("float16", ["lm_head"])
    if format == "nf4":
        return nf4.quantization_config("float32", ["lm_head"])
    if format == "vptq":
        return {"quant_method": "vptq", **said}
    if format == "vq2":
        return vq2.quantization_config("float16", ["lm_head"])
    if format in ("awq", "gptq"):
        from tests.support.formats import int4_checkpoints

        return int4_checkpoints.Int4(format, 32, act_order=format == "gptq").config
    return {"quant_method": "aqlm"} if format == "aqlm" else {}
