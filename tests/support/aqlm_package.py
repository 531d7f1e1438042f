"""The package aqlm, whose function is the definition of the format."""

from __future__ import annotations

import os

from torch import Tensor

os.environ["AQ_USE_JIT"] = "0"  # its function as it is written: torch warns about scripting it

from aqlm.utils import _dequantize_weight, unpack_int_data


def dequantized(codes: Tensor, codebooks: Tensor, scales: Tensor) -> Tensor:
    """As its Linear on a CPU does it: [out, in] in the type of the codebooks."""
    bits = codebooks.shape[1].bit_length() - 1
    return _dequantize_weight(unpack_int_data(codes, bits), codebooks, scales)
