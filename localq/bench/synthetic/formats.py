"""The matrices of a decoder on random numbers, in each format of `FORMATS`: what its `sample` gives, one by one.

A matrix is of the variant that random weights are of (`format_facts`), and has about unit gain. Two peculiarities: what
`localq quantize` makes on a text has codebooks and rotations as that writes them, and where that turns the stream the
head is no longer the embedding (`changes`); of mixtures, MXFP4 has the experts alone (`experts.py`). AWQ and GPTQ take
groups of 128 columns where all matrices have whole ones, else of 64.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from localq.bench.synthetic import experts as random_experts
from localq.bench.synthetic.tensors import TensorSpec, codes, constant, sample_specs, scales, tensor_spec
from localq.errors import usage_error
from localq.files import format_facts
from localq.formats import FORMATS
from localq.formats.codebooks.vq2 import Packed
from localq.models.decoder import Block, Decoder
from localq.models.layers import PlainLinear
from localq.models.unstacked_experts import unstack
from localq.quantize.codebooks.initial_codebooks import load_initial
from localq.quantize.model.fold import can_rotate_stream
from localq.quantize.model.matrix_groups import groups_of
from localq.quantize.settings import ConversionSettings, Effort, rotate_mode
from localq.quantize.target import TargetFormat, target_format

GROUPS = (128, 64)  # columns that share a scale, where a scheme says nothing: the first that divides all columns


def linears(model: Decoder, format: str) -> dict[str, nn.Linear]:
    """The Linears of the blocks that `format` takes, by their path in the model."""
    facts = format_facts.of(format)
    if format not in FORMATS or (facts.experts_only and model.config.experts):
        return {}
    found = model.layers.named_modules(prefix="layers")
    matrices = {path: each for path, each in found if isinstance(each, nn.Linear) and not isinstance(each, PlainLinear)}
    return {path: each for path, each in matrices.items() if each.in_features % FORMATS[format].BLOCK == 0}


def parts(format: str, model: Decoder, seed: int) -> dict[str, TensorSpec]:
    """Every tensor of `linears`, and of experts, by its name in a checkpoint. `model` may be on the meta device."""
    if format not in FORMATS:
        return {}
    found = linears(model, format)
    if (target := _target(format)) is not None:
        return _on_a_text(target, model, set(found), seed)
    shapes = {f"model.{path}": (each.out_features, each.in_features) for path, each in found.items()}
    shapes |= random_experts.matrices(model, format)
    return sample_specs(shapes, FORMATS[format], _scheme(model, format)) | random_experts.stack_specs(model, format)


def changes(format: str, model: Decoder, dtype: str) -> dict[str, Any]:
    """Entries of config.json that change with the format; dtype: "float16" or "bfloat16".

    Raises LocalqError (exit 2) for a type that the format has no models of.
    """
    if (target := _target(format)) is not None:
        if target.dtype(dtype) != dtype:
            raise usage_error(format, f"random weights in this format must be {target.dtype(dtype)}, not {dtype}")
        untied = {"tie_word_embeddings": False} if can_rotate_stream(model) else {}
        return {**untied, "quantization_config": target.quantization_config(dtype, [])}
    if format not in FORMATS:
        return {}
    columns = {f"model.{path}": each.in_features for path, each in linears(model, format).items()}
    return {"quantization_config": FORMATS[format].quantization_config(dtype, [], _scheme(model, format), columns)}


def _target(format: str) -> TargetFormat | None:
    """Return the encoder's target format; None for formats that are not calibrated on a text."""
    facts = format_facts.of(format)
    return target_format(facts.quantize_name or format) if facts.made_from == "text" else None


def _scheme(model: Decoder, format: str) -> str:
    """The variant that random weights are of."""
    stated = format_facts.of(format).random_scheme
    if stated or FORMATS[format].VARIANTS == ("",):
        return stated
    columns = {each.in_features for each in linears(model, format).values()}
    columns |= {each for *_, each in random_experts.stacks(model, format).values()}
    size = next((size for size in GROUPS if all(each % size == 0 for each in columns)), GROUPS[-1])
    return f"g{size}"


def _on_a_text(target: TargetFormat, model: Decoder, paths: set[str], seed: int) -> dict[str, TensorSpec]:
    """With the books that the encoder begins with."""
    books = load_initial(target.scheme, torch.device("cpu"))
    codebooks = [(book.stride, book.codewords.half()) for book in books]
    power = sum(float(book.codewords.square().sum(1).mean()) / book.stride for book in books)
    settings = ConversionSettings(Effort(), (), rotate=rotate_mode(can_rotate_stream(model), target.rotates), seed=seed)
    found: dict[str, TensorSpec] = {}
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
                    found[f"model.layers.{index}.{home}{suffix}"] = tensor_spec(dtype, shape, recipe)
    return found


def _one_row(codebooks: list[tuple[int, Tensor]], signs: Tensor | None, columns: int) -> Packed:
    """A matrix [1, columns], for what does not depend on the number of rows."""
    pairs = tuple((torch.zeros(1, columns // stride, dtype=torch.uint8), values) for stride, values in codebooks)
    return Packed(pairs, torch.ones(1, dtype=torch.float16), signs, (1, columns))
