"""The package aqlm, whose function is the definition of the format, by itself and in transformers."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

os.environ["AQ_USE_JIT"] = "0"  # its function as it is written: torch warns about scripting it

from aqlm.inference import QuantizedLinear
from aqlm.utils import _dequantize_weight, unpack_int_data


def dequantized(codes: Tensor, codebooks: Tensor, scales: Tensor) -> Tensor:
    """As its Linear on a CPU does it: [out, in] in the type of the codebooks."""
    bits = codebooks.shape[1].bit_length() - 1
    return _dequantize_weight(unpack_int_data(codes, bits), codebooks, scales)


def logits(
    folder: Path, ids: list[int], quantized: int, dtype: torch.dtype = torch.float32, kept: torch.dtype | None = None
) -> Tensor:
    """[T, vocab] of transformers with the package, which finds `quantized` Linears in the checkpoint, in `dtype`.

    By the package's way of dequantizing, which takes every layout; for 256 entries it would take a numba kernel on a
    CPU. kept: the type in which it dequantizes, that of the files say; without, `dtype`, to which transformers casts
    codebooks and scales.
    """
    from transformers import AutoModelForCausalLM

    logging.disable(logging.WARNING)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    finally:
        logging.disable(logging.NOTSET)
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(linears) == quantized
    for linear in linears:
        linear.forward = functools.partial(_product, linear, kept or dtype)
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([ids])).logits[0]
    return found


def _product(linear: Any, kept: torch.dtype, x: Tensor) -> Tensor:
    weight = dequantized(linear.codes, linear.codebooks.to(kept), linear.scales.to(kept))
    return F.linear(x, weight.to(x.dtype), linear.bias)
