"""The buffer for weights that prefill dequantizes: a slab of a matrix at a time. Torch-free."""

from __future__ import annotations

from localq.files import format_facts
from localq.files.architecture import Architecture
from localq.files.format_facts import Format
from localq.files.linears import Linears

PREFILL_SCRATCH = 256 * 2**20  # limit of weights dequantized for prefill


def slab_bytes(largest: int, itemsize: int) -> int:
    """Bytes of the buffer for dequantized weights; `largest`: weights of the largest matrix."""
    return min(itemsize * largest, PREFILL_SCRATCH)


def slab_of(arch: Architecture, format: str, itemsize: int) -> int:
    """Bytes of the buffer for dequantized weights of a model."""
    formats = ((each, format_facts.of_linear(arch, each, format)) for each in arch.linears)
    return slab_bytes(max(slab_weights(each, of) for each, of in formats), itemsize)


def slab_weights(linear: Linears, format: Format) -> int:
    """Most weights that a product with such a matrix dequantizes at once.

    Gate and up of an expert are one product if the format stacks experts, else two.
    """
    if not format.is_quantized:
        return 0
    together = linear.expert and linear.name == "gate, up" and format.stacks_experts
    return linear.rows * linear.columns * (2 if together else 1)
