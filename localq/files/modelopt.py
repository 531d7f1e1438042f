"""The quantization settings of NVIDIA ModelOpt: NVFP4, FP8, or both in one model. Torch-free.

`quant_algo` names the algorithm; MIXED_PRECISION lists modules in `quantized_layers`, each with its own. Names are not
matched: the tensors of a module say in which of the formats it is (`formats.nvfp4`, `formats.fp8`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METHOD = "modelopt"
FORMATS = {"NVFP4": "nvfp4", "FP8": "fp8"}
MIXED = "MIXED_PRECISION"


def format_of(quantization: Mapping[str, Any]) -> str:
    """The format of the weights: "nvfp4" if some are, "fp8" if all are; METHOD if localq does not read them all."""
    algorithm, layers = quantization.get("quant_algo"), quantization.get("quantized_layers")
    algorithms = [algorithm]
    if algorithm == MIXED:
        stated = layers.values() if isinstance(layers, dict) else ()
        algorithms = [each.get("quant_algo") if isinstance(each, dict) else None for each in stated]
    if not algorithms or not all(isinstance(each, str) and each in FORMATS for each in algorithms):
        return METHOD
    return "nvfp4" if "NVFP4" in algorithms else "fp8"
