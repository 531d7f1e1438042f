"""Keys and values in 8 and 4 bit: the definition, in torch, for the CPU; reference of csrc/attention/kv_codes.cuh.

A vector of head_dim elements (a multiple of 8) is rotated by a Hadamard matrix over runs of w = 32, 16 or 8 elements,
the largest that divides head_dim: outliers of single channels spread over their run. The matrix is symmetric and its
own inverse. Decode attention rotates q as well and its result back, and never the stored vectors. Each block of 32
rotated elements (the last may be shorter) then has one f16 scale s:

  8 bit   s = f16(largest / 127);       byte = round(x / s) + 128;            value = s * (byte - 128)
  4 bit   s = f16(largest / r), for r in RANGES the one with the least squared error, the first of equals;
          code = round((x / s + 15) / 2) in 0..15;                            value = s * (2 code - 15)
          of 8 neighbours in a little-endian u32, element 2i lies at bit 4i and element 2i + 1 at bit 16 + 4i

codes   u8  [..., head_dim * bits / 8]
scales  f16 [..., n], n = kv_bits.scale_count(head_dim) = 2, 4 or 8: of the even blocks, then of the odd ones

At head_dim 64, 128 and 256 that is 8.5 and 4.5 bits per element. NaN and infinity leave no finite value in their block.

Accuracy on SmolLM2-135M (head_dim 64), float32 on the CPU: mean KL of the logits against an unquantized cache, in nats,
and fraction of equal top tokens, over 512 tokens of LICENSE (`pytest -s tests/engine/test_kv_accuracy.py`, one thread,
torch 2.13):

  8 bit                    2.2e-4   0.996
  keys in 8, values in 4   7.0e-3   0.949
  4 bit                    6.1e-2   0.865

On 768 tokens of the validation slice of wikitext-2 the same comparison gave 1.3e-4 and 3.6e-2; there, without the
Hadamard matrix 3.1e-4 and 0.10, with it over all 64 columns 1.5e-4 and 4.3e-2, with one fixed range 4.6e-2, and with a
minimum per block as well (5 bits an element) 3.0e-2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localq import kv_bits

BLOCK = 32
RANGES = (13.0, 14.0, 15.0, 16.0, 17.0, 18.0)  # half steps from 0 to the largest; 15 clips nothing


def rotate(x: Tensor) -> Tensor:
    """Multiply x f32 [..., head_dim] with the Hadamard matrix of each run; applied twice it gives x again."""
    head_dim = x.shape[-1]
    width = next(width for width in (32, 16, 8) if head_dim % width == 0)
    step = 1
    turned = x
    while step < width:
        low, high = turned.reshape(*x.shape[:-1], head_dim // (2 * step), 2, step).unbind(-2)
        turned = torch.stack((low + high, low - high), -2).reshape(x.shape)
        step *= 2
    return turned.mul(width**-0.5)


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize x [..., head_dim] to codes and scales. Raises ValueError for bits other than 8 and 4."""
    head_dim = x.shape[-1]
    blocks = _blocks(rotate(x.float()))  # [..., blocks, 32]
    largest = blocks.abs().amax(-1, keepdim=True)
    if bits == 8:
        scale = (largest / 127).half()
        codes = _no_nan(_divide(blocks, scale).round()).clamp(-127, 127) + 128
    elif bits == 4:
        scale, codes = _best(blocks, largest)
    else:
        raise ValueError(f"a KV cache of {bits} bits is not defined, only of 16, 8 and 4")
    bytes = codes.flatten(-2)[..., :head_dim].to(torch.uint8)
    return (bytes if bits == 8 else _pack(bytes)), _spread(scale.squeeze(-1), head_dim)


def dequantize(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Dequantize codes and scales to vectors in `dtype` [..., head_dim]."""
    levels = codes.float() - 128 if bits == 8 else 2 * _unpack(codes).float() - 15
    head_dim = levels.shape[-1]
    half = scales.shape[-1] // 2
    per_block = torch.stack((scales[..., :half], scales[..., half:]), -1).flatten(-2).float()
    return rotate(levels * per_block.repeat_interleave(BLOCK, -1)[..., :head_dim]).to(dtype)


def _blocks(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % BLOCK
    return torch.nn.functional.pad(x, (0, missing)).reshape(*x.shape[:-1], -1, BLOCK)


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale, 0 where the scale is 0."""
    return torch.where(scale == 0, torch.zeros_like(x), x * scale.float().reciprocal())


def _no_nan(codes: Tensor) -> Tensor:
    return torch.where(codes.isnan(), torch.zeros_like(codes), codes)  # their scale is NaN or infinite


def _best(blocks: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and codes of the range with the least error."""

    def coded(span: float) -> tuple[Tensor, Tensor, Tensor]:
        scale = (largest / span).half()
        codes = _no_nan((_divide(blocks, scale) * 0.5 + 7.5).round()).clamp(0, 15)
        return (scale.float() * (2 * codes - 15) - blocks).square().sum(-1, keepdim=True), scale, codes

    error, scale, codes = coded(RANGES[0])
    for span in RANGES[1:]:
        new_error, new_scale, new_codes = coded(span)
        less = new_error < error
        error, scale = torch.where(less, new_error, error), torch.where(less, new_scale, scale)
        codes = torch.where(less, new_codes, codes)
    return scale, codes


def _pack(codes: Tensor) -> Tensor:
    """Pack u8 [..., n] below 16 to [..., n / 2]: bytes 0 to 3 of a word are elements (0, 2), (4, 6), (1, 3), (5, 7)."""
    eight = codes.reshape(*codes.shape[:-1], -1, 2, 2, 2)  # [..., word, byte of the half word, nibble, odd]
    return torch.bitwise_or(eight[..., 0, :], eight[..., 1, :] << 4).transpose(-1, -2).flatten(-3)


def _unpack(packed: Tensor) -> Tensor:
    four = packed.reshape(*packed.shape[:-1], -1, 2, 2).transpose(-1, -2)  # [..., word, byte of the half word, odd]
    return torch.stack((four & 15, four >> 4), -2).flatten(-4)


def _spread(scales: Tensor, head_dim: int) -> Tensor:
    """Reorder f16 [..., blocks] to [..., n]: padded, even blocks before odd ones."""
    count = kv_bits.scale_count(head_dim)
    padded = torch.nn.functional.pad(scales, (0, count - scales.shape[-1]))
    return padded.reshape(*scales.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
