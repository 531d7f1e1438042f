"""Descriptions of a quantization in a file beside config.json, as some programs write them. Torch-free.

    quantize_config.json       AutoGPTQ, GPTQModel
    quant_config.json          AutoAWQ, llm-awq, SqueezeLLM
    quantization_config.json   AutoRound and others: the object that config.json has elsewhere
    hf_quant_config.json       NVIDIA ModelOpt

What config.json says itself counts first. The description counts only where the weights are quantized, because some
repositories keep one beside full-precision weights.

Three programs store formats of others. Their descriptions get its `quant_method` and keep their other fields:

    auto-round          GPTQ or AWQ; `packing_format` names the packing, `extra_config` layers of their own
    compressed-tensors  NVFP4, MXFP4 and FP8 (`compressed_tensors.format_of`)
    modelopt            NVFP4 and FP8 (`modelopt.format_of`)
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from localq.errors import bad_file
from localq.files import compressed_tensors, modelopt
from localq.files.json_files import DAMAGED, inside, read_object

NAMES = ("quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json")
MAX_BYTES = 8 * 2**20
AUTO_ROUND = "auto-round"
# Ends of tensor names that only quantized weights have.
_QUANTIZED = (".qweight", ".qzeros", ".weight_scale", ".weight_scale_inv", ".weight_packed", ".lookup_table")


def are_quantized(names: Iterable[str]) -> bool:
    """Return whether some of these tensors belong to a matrix quantized by the programs above."""
    return any(name.endswith(_QUANTIZED) for name in names)


def describe(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` of a file beside config.json; None if config.json has one, or there is no such file.

    That of config.json too, if it is of a program that stores a format of others.

    Its `quant_method` is named in every case. Raises LocalqError (exit 8) for a malformed file, and one that describes
    no quantization.
    """
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        if (stated := part.get("quantization_config")) is not None:
            renamed = _renamed(stated) if isinstance(stated, dict) else stated
            return None if renamed is stated else renamed
        if isinstance(older := part.get("compression_config"), dict):  # early compressed-tensors, in config.json
            return _renamed({"quant_method": compressed_tensors.METHOD, **older})
    for name in NAMES:
        if (path := inside(folder, name)) is not None:
            return _normalize(read_object(path, MAX_BYTES), folder / name)
    return None


def _normalize(stated: dict[str, Any], path: Path) -> dict[str, Any]:
    """The form of config.json: with `quant_method`."""
    if isinstance(inner := stated.get("quantization"), dict):  # ModelOpt
        return _renamed({**inner, "quant_method": modelopt.METHOD})
    method = stated.get("quant_method")
    if isinstance(method, str) and method:
        return _renamed({**stated, "quant_method": method.lower()})
    if "wbits" in stated:
        return {**stated, "quant_method": "squeezellm"}
    if stated.keys() & {"w_bit", "q_group_size", "zero_point"}:
        return {**stated, "quant_method": "awq"}
    if "bits" in stated:
        return {**stated, "quant_method": "gptq"}
    raise bad_file(str(path), "no quantization settings (such as quant_method, bits or w_bit) found", DAMAGED)


def _renamed(stated: dict[str, Any]) -> dict[str, Any]:
    """The same under the name of the format that its program stores; other descriptions as they are."""
    if stated.get("quant_method") == AUTO_ROUND:
        packing = stated.get("packing_format", "auto_round:auto_gptq")  # the default of vLLM and AutoRound
        return {**stated, "quant_method": "awq" if "awq" in str(packing) else "gptq", "packing_format": packing}
    if stated.get("quant_method") == modelopt.METHOD and modelopt.format_of(stated) != modelopt.METHOD:
        return {**stated, "quant_method": modelopt.format_of(stated)}
    if stated.get("quant_method") == compressed_tensors.METHOD:
        format, block = compressed_tensors.format_of(stated), compressed_tensors.fp8_block(stated)
        if format != compressed_tensors.METHOD or block is not None:
            return {**stated, "quant_method": format, **({} if block is None else {"weight_block_size": block})}
    return stated
