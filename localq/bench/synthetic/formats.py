"""The matrices of a decoder on random numbers, in each format that random weights are made in.

nf4    double-quantized
vq2    s4l16, and aqlm 2x8 in groups of 8: names, sizes, codebooks and rotations as `localq quantize` writes them. Where
       it turns the stream the head is no longer the embedding (`changes`)
vptq   v8-k65536-256 with permutation and norm, as is published most
awq    groups of 128 columns where all matrices have whole ones, else of 64; zero points of 8, as symmetric files have
gptq   the same, columns in order
bcq    3 planes in groups of 128 columns, as `localq quantize` makes it where nothing is said
mxfp4  of mixtures the experts alone; `random_experts.py`
squeezellm  values of every row normal

Codes are uniform (of AWQ and GPTQ all but 0), so codewords are read as evenly as can be. Scales are such that a row has
about unit gain.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from localq.bench.synthetic import experts as random_experts
from localq.bench.synthetic.tensors import SPREAD, Part, around_8, codes, constant, filled, normal, order, part, scales
from localq.errors import usage_error
from localq.formats import bcq, mxfp4, nf4, squeezellm, vptq
from localq.formats.codebooks import vq2
from localq.formats.codebooks.vq2 import Packed
from localq.formats.int4 import read as int4_read
from localq.formats.vptq import read as vptq_read
from localq.models.decoder import Block, Decoder
from localq.models.experts import Router
from localq.models.unstacked_experts import unstack
from localq.quantize.codebooks.initial_codebooks import load_initial
from localq.quantize.model.fold import can_rotate_stream
from localq.quantize.model.matrix_groups import groups_of
from localq.quantize.settings import ConversionSettings, Effort, rotate_mode
from localq.quantize.target import TargetFormat, target_format

TARGETS = {"vq2": "vq2", "aqlm": "aqlm2x8"}  # what `localq quantize --format` calls it
GROUPS = (128, 64)  # of AWQ and GPTQ: the first that divides all columns
BLOCKS = {"nf4": nf4.BLOCK, "mxfp4": mxfp4.BLOCK, "squeezellm": squeezellm.BLOCK, "vq2": vq2.BLOCK, "bcq": bcq.BLOCK,
          "aqlm": 8, "vptq": 1, "awq": GROUPS[-1], "gptq": GROUPS[-1]}  # columns come in multiples of it  # fmt: skip
INT4: dict[str, dict[str, Any]] = {  # what config.json says besides sizes
    "awq": {"version": "gemm", "zero_point": True},
    "gptq": {"checkpoint_format": "gptq", "desc_act": False, "sym": True},
}
EIGHTS = {"awq": 0x88888888 - 2**32, "gptq": 0x77777777}  # eight zero points of 8 as stored
POWER = 17.5  # mean square of a code less 8: 1 to 15, 8 twice as often
VECTOR, CENTROIDS, RESIDUALS = 8, 65_536, 256  # of VPTQ
RESIDUAL, BIAS = 0.1, 0.01  # of VPTQ: deviations of residual codewords and of the norm's bias, in parts of a weight's

Suffixed = dict[str, Part]  # suffix of a Linear's tensor -> how it is made


def linears(model: Decoder, format: str) -> dict[str, nn.Linear]:
    """The Linears of the blocks that `format` takes, by their path in the model."""
    found = model.layers.named_modules(prefix="layers")
    step = 0 if format == "mxfp4" and model.config.experts else BLOCKS.get(format, 0)
    matrices = {path: each for path, each in found if isinstance(each, nn.Linear) and not isinstance(each, Router)}
    return {path: each for path, each in matrices.items() if step and each.in_features % step == 0}


def parts(format: str, model: Decoder, seed: int) -> dict[str, Part]:
    """Every tensor of `linears`, and of experts, by its name in a checkpoint. `model` may be on the meta device."""
    found = linears(model, format)
    if format in TARGETS:
        return _additive(target_format(TARGETS[format]), model, set(found), seed)
    makes: dict[str, Callable[[int, int], Suffixed]] = {
        "vptq": _vptq, "bcq": _bcq, "mxfp4": random_experts.linear, "squeezellm": _squeezellm,
    }  # fmt: skip
    make = makes.get(format, _nf4)
    if format in INT4:
        make = partial(_int4, format, _group(model, format))
    made = {path: make(each.out_features, each.in_features) for path, each in found.items()}
    made |= random_experts.parts(model, format, make)
    return {f"model.{path}{suffix}": each for path, group in made.items() for suffix, each in group.items()}


def changes(format: str, model: Decoder, dtype: str) -> dict[str, Any]:
    """What config.json says besides the shape; dtype: "float16" or "bfloat16".

    Raises LocalqError (exit 2) for a type that the format has no models of.
    """
    if format == "vptq":
        said = {f"model.{path}": _said(each.in_features) for path, each in linears(model, format).items()}
        return {"quantization_config": {"quant_method": vptq.quant_method, "config_for_layers": said}}
    if format in INT4:
        of_int4 = {"quant_method": format, "bits": 4, "group_size": _group(model, format)}
        return {"quantization_config": {**of_int4, **INT4[format]}}
    if format == "squeezellm":
        return {"quantization_config": squeezellm.quantization_config(dtype, [])}
    if format == "bcq":
        return {"quantization_config": bcq.quantization_config(dtype, [])}
    if format == "mxfp4":
        return {"quantization_config": mxfp4.quantization_config(dtype, [])}
    if format not in TARGETS:
        return {}
    target = target_format(TARGETS[format])
    if target.dtype(dtype) != dtype:
        raise usage_error(format, f"its models are made in {target.dtype(dtype)}, not in {dtype}")
    untied = {"tie_word_embeddings": False} if can_rotate_stream(model) else {}
    return {**untied, "quantization_config": target.quantization_config(dtype, [])}


# ---- vq2 and AQLM


def _additive(target: TargetFormat, model: Decoder, paths: set[str], seed: int) -> dict[str, Part]:
    """With the books that the encoder begins with."""
    books = load_initial(target.scheme, torch.device("cpu"))
    codebooks = [(book.stride, book.codewords.half()) for book in books]
    power = sum(float(book.codewords.square().sum(1).mean()) / book.stride for book in books)
    settings = ConversionSettings(
        Effort(), (), rotate=rotate_mode(can_rotate_stream(model), target.rotates), seed=seed
    )
    found: dict[str, Part] = {}
    for index, block in enumerate(model.layers):
        assert isinstance(block, Block)
        block = unstack(copy.deepcopy(block))
        for group in groups_of(block):
            homes, of_expert = group.homes(target.shares), group.expert is not None
            for name in (each for each in group.names if of_expert or f"layers.{index}.{each}" in paths):
                linear = block.get_submodule(name)
                assert isinstance(linear, nn.Linear)
                out, columns = linear.out_features, linear.in_features
                signs = group.signs(columns, index, settings)
                constants = target.to_tensors(_one_row(codebooks, signs, columns), "", "")
                for suffix, (dtype, shape) in target.layout(out, columns, signs=signs is not None).items():
                    home = homes[name] if suffix.startswith(".codebook") else name
                    recipe = constant(constants[suffix])
                    if suffix == ".scales":
                        recipe = scales((columns * power) ** -0.5)
                    elif suffix.startswith(".codes"):
                        recipe = codes
                    found[f"model.layers.{index}.{home}{suffix}"] = part(dtype, shape, recipe)
    return found


def _one_row(codebooks: list[tuple[int, Tensor]], signs: Tensor | None, columns: int) -> Packed:
    """A matrix [1, columns], for what does not depend on the number of rows."""
    pairs = tuple((torch.zeros(1, columns // stride, dtype=torch.uint8), values) for stride, values in codebooks)
    return Packed(pairs, torch.ones(1, dtype=torch.float16), signs, (1, columns))


# ---- SqueezeLLM


def _squeezellm(out: int, columns: int) -> Suffixed:
    makes = (codes, normal(columns**-0.5))
    described = squeezellm.layout(out, columns).items()
    return {suffix: part(dtype, shape, make) for (suffix, (dtype, shape)), make in zip(described, makes, strict=True)}


# ---- VPTQ


def _vptq(out: int, columns: int) -> Suffixed:
    shapes = vptq_read.Layer(out, columns, VECTOR, CENTROIDS, RESIDUALS, 0, 0, 0, 1, columns, True).shapes()
    of_weight = columns**-0.5
    made = {
        "indices": (torch.int32, codes),
        "centroids": (torch.float16, normal(1.0)),
        "res_centroids": (torch.float16, normal(RESIDUAL)),
        "places": (torch.int16, order),
        "weight_scale": (torch.float16, scales(of_weight)),
        "weight_bias": (torch.float16, normal(BIAS * of_weight)),
    }
    return {vptq_read.SUFFIXES[name]: part(dtype, shapes[name], make) for name, (dtype, make) in made.items()}


def _said(columns: int) -> dict[str, Any]:
    """What config.json says of one matrix."""
    sizes = {"vector_lens": VECTOR, "num_centroids": CENTROIDS, "num_res_centroids": RESIDUALS}
    flags = dict.fromkeys(("enable_norm", "enable_perm", "is_indice_packed"), True)
    pairs = {name: [-1, size] for name, size in sizes.items()}  # [of outliers, of the rest]
    return {**pairs, **flags, "outlier_size": 0, "group_num": 1, "group_size": columns, "in_features": columns}


# ---- AWQ and GPTQ


def _group(model: Decoder, format: str) -> int:
    columns = {each.in_features for each in linears(model, format).values()}
    columns |= {each for *_, each in random_experts.stacks(model, format).values()}
    return next((size for size in GROUPS if all(each % size == 0 for each in columns)), GROUPS[-1])


def _int4(format: str, group: int, out: int, columns: int) -> Suffixed:
    groups, words = columns // group, out // int4_read.WORD
    along_out = format == "awq"
    wide = (columns, words) if along_out else (columns // int4_read.WORD, out)
    found = {
        ".qweight": part(torch.int32, wide, around_8),
        ".qzeros": part(torch.int32, (groups, words), filled(EIGHTS[format])),
        ".scales": part(torch.float16, (groups, out), scales((columns * POWER) ** -0.5)),
    }
    if not along_out:
        found[".g_idx"] = part(torch.int32, (columns,), constant((torch.arange(columns) // group).to(torch.int32)))
    return found


# ---- binary codes


def _bcq(out: int, columns: int) -> Suffixed:
    """Planes count alike: a weight is a sum of three of them, so its square is three times that of a scale."""
    signs, alphas = bcq.layout(out, columns).items()
    planes = signs[1][1][1]
    return {signs[0]: part(*signs[1], codes), alphas[0]: part(*alphas[1], scales((columns * planes) ** -0.5))}


# ---- NF4


def unit_absmax(columns: int) -> float:
    """The absmax at which a row of uniformly random NF4 codes has unit gain."""
    return 1 / (math.sqrt(columns) * float(nf4.CODE_MAP.square().mean().sqrt()))


def _nf4(out: int, columns: int) -> Suffixed:
    constants = _constants(out, columns)
    found = {suffix: part(*described, codes) for suffix, described in nf4.layout(out, columns).items()}
    for suffix, each in found.items():
        name = suffix.removeprefix(".weight")
        if name == ".nested_absmax":  # of absmax, which are codes of a map that spans -1 to 1
            found[suffix] = Part(each.info, filled(SPREAD * unit_absmax(columns)))
        elif name not in ("", ".absmax"):
            found[suffix] = Part(each.info, constant(constants[suffix]))
    return found


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
