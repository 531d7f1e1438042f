"""Checkpoints of tiny mixtures as they are published: a matrix for each expert, in 16 bit, bitsandbytes NF4 or AQLM.

None of it goes through localq's own writers: NF4 is bitsandbytes', AQLM that of `aqlm_checkpoints`, dequantized by its
package. transformers 5 cannot load quantized experts from such files (it joins them as if they were dense), so the
reference is its model of the dequantized weights.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localq.formats import fp8, gguf, mxfp4, nvfp4
from localq.formats.codebooks import vq2
from tests.support.formats import int4_checkpoints, vq2_checkpoints
from tests.support.formats.aqlm_checkpoints import LAYOUTS, tensors
from tests.support.formats.int4_checkpoints import COMPRESSED, Int4
from tests.support.models.tiny_checkpoints import make_checkpoint

LINEAR = re.compile(r".*\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj|experts\.\d+\.\w+)\.weight")
ROUTER = re.compile(r".*\.(?:mlp|block_sparse_moe)\.gate\.weight")
Quantize = Callable[[str, Tensor, int], tuple[dict[str, Tensor], Tensor]]  # prefix, weight, number of the matrix


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    held: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        held |= load_file(shard)
    return held


def write(folder: Path, held: dict[str, Tensor], like: Path, **config: Any) -> Path:
    """A checkpoint of these tensors, with the config.json of `like` and what is changed in it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: each.contiguous() for name, each in held.items()}, folder / "model.safetensors", {"format": "pt"})
    for file in like.glob("*.json"):
        if not file.name.endswith(".index.json"):
            (folder / file.name).write_text(file.read_text())
    stated = json.loads((like / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, **config}))
    return folder


def nf4(prefix: str, weight: Tensor, number: int, nested: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    """By bitsandbytes: the tensors that it stores, and what it makes of them."""
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(weight.float(), compress_statistics=nested, quant_type="nf4")
    made = {f"{prefix}.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    return {f"{prefix}.weight": codes, **made}, functional.dequantize_4bit(codes, state)


def aqlm(layout: str, prefix: str, weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes and codebooks, and what the package makes of them."""
    from tests.support.formats.aqlm_package import dequantized

    made = tensors((weight.shape[0], weight.shape[1]), LAYOUTS[layout], torch.float16, number)
    return {prefix + suffix: each for suffix, each in made.items()}, dequantized(*made.values())


def awq(prefix: str, weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes, and what the formula makes of them."""
    made = int4_checkpoints.tensors((weight.shape[0], weight.shape[1]), AWQ, seed=number)
    return {prefix + name: each for name, each in made.items()}, int4_checkpoints.reference(made, AWQ)


def gptq(prefix: str, weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes, with a bias of zeros as AutoGPTQ wrote one, and what the formula makes of them."""
    made = int4_checkpoints.tensors((weight.shape[0], weight.shape[1]), GPTQ, seed=number)
    plain = int4_checkpoints.reference(made, GPTQ)
    return {
        f"{prefix}.bias": torch.zeros(weight.shape[0]),
        **{prefix + name: each for name, each in made.items()},
    }, plain


def compressed(prefix: str, weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes of compressed-tensors, without zero points, and what its package makes of them."""
    made = int4_checkpoints.tensors((weight.shape[0], weight.shape[1]), SYMMETRIC, torch.bfloat16, number)
    return {prefix + name: each for name, each in made.items()}, int4_checkpoints.reference(made, SYMMETRIC)


def of_vq2(scheme: str, prefix: str, weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes, each matrix with a codebook of its own and every third with signs, and what they stand for."""
    packed = vq2_checkpoints.packed_of((weight.shape[0], weight.shape[1]), scheme, number % 3 == 0, number)
    return vq2.to_tensors(packed, prefix), vq2.dequantize(packed, torch.float32)


def of_gguf(prefix: str, weight: Tensor, number: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random blocks of two types in turn, and what they stand for."""
    packed = gguf.sample((weight.shape[0], weight.shape[1]), number, scheme=("Q8_0", "Q5_1")[number % 2])
    return {prefix + suffix: each for suffix, each in gguf.stored(packed).items()}, gguf.dequantize(
        packed, torch.float32
    )


def of_floats(module: ModuleType, scheme: str, prefix: str, weight: Tensor, number: int
              ) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """Random NVFP4 or FP8, and what it stands for."""
    packed = module.sample((weight.shape[0], weight.shape[1]), number, scheme=scheme)
    return {prefix + suffix: each for suffix, each in module.stored(packed).items()}, module.dequantize(
        packed, torch.float32
    )


GPTQ, AWQ, SYMMETRIC = Int4("gptq", 32, act_order=True), Int4("awq", 64), Int4(COMPRESSED, 32, symmetric=True)
CONFIGS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "aqlm": {"quant_method": "aqlm", "in_group_size": 8, "linear_weights_not_to_quantize": []},
    "gptq": GPTQ.config,
    "awq": AWQ.config,
    COMPRESSED: SYMMETRIC.config,
    "vq2": vq2.quantization_config("bfloat16", []),
    "gguf": gguf.quantization_config("bfloat16", []),
    "nvfp4": nvfp4.quantization_config("bfloat16", []),
    "fp8": fp8.quantization_config("bfloat16", []),
}
FORMATS: dict[str, Quantize] = {
    "nf4": nf4,
    "nf4 plain": functools.partial(nf4, nested=False),
    "aqlm 2x8g8": functools.partial(aqlm, "2x8g8"),
    "aqlm 1x16g8": functools.partial(aqlm, "1x16g8"),
    "gptq": gptq,
    "awq": awq,
    COMPRESSED: compressed,
    "gguf": of_gguf,
    "nvfp4": functools.partial(of_floats, nvfp4, "divided"),
    "fp8": functools.partial(of_floats, fp8, "rows"),
    "vq2 s4l16": functools.partial(of_vq2, "s4l16"),
}


def quantized(
    folder: Path, source: Path, format: str, routers: bool = False, keep: Callable[[str], bool] = lambda name: False
) -> tuple[Path, Path]:
    """(the model of `source` in `format`, the same dequantized in 16 bit), in `folder`.

    All Linears of blocks are quantized but those whose name is to `keep`; routers as well where it is said, for
    bitsandbytes takes them for Linears.
    """
    packed, plain = {}, {}
    for number, (name, weight) in enumerate(sorted(read(source).items())):
        wanted = LINEAR.fullmatch(name) or (routers and ROUTER.fullmatch(name))
        if not wanted or keep(name):
            packed[name] = plain[name] = weight
            continue
        made, plain[name] = FORMATS[format](name.removesuffix(".weight"), weight, number)
        packed |= made
    stated = CONFIGS[format.partition(" ")[0]]
    return write(folder / "packed", packed, source, quantization_config=stated), write(folder / "plain", plain, source)


@functools.cache
def logits(folder: Path, ids: tuple[int, ...]) -> Tensor:
    """f32 [T, vocab] of transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        found: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return found


def fused(folder: Path, source: Path) -> Path:
    """The model of `source` in 16 bit as transformers 5 has it in memory: the experts of a layer in one tensor."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(folder, save_original_format=False)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_text((source / file).read_text())
    return folder


def source(folder: Path, model_type: str, **overrides: Any) -> Path:
    """A tiny mixture in bfloat16, a matrix for each expert."""
    made = make_checkpoint(folder, model_type, initializer_range=0.15, **{"num_hidden_layers": 2, **overrides})
    assert any(re.search(r"experts\.3\.", name) for name in read(made)), "transformers saves experts one by one"
    return made


def gpt_oss_published(folder: Path, source: Path) -> Path:
    """The gpt_oss of `source`, in 16 bit, with its experts in MXFP4 in the layout of openai/gpt-oss-20b."""
    held = read(source)
    for name in [name for name in held if name.endswith(("gate_up_proj", "down_proj"))]:
        packed = [mxfp4.quantize(expert.T.contiguous()) for expert in held.pop(name)]
        held[f"{name}_blocks"] = torch.stack([each.codes.unflatten(1, (-1, 16)) for each in packed])
        held[f"{name}_scales"] = torch.stack([each.scales for each in packed])
    return write(folder, held, source, quantization_config={"quant_method": "mxfp4"})
