"""The Triton kernels of `triton_rivals`; importing this file needs triton.

No `from __future__ import annotations` here: triton reads the annotations of its kernels.
"""
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,misc,no-untyped-def,unused-ignore"

import triton
import triton.language as tl


@triton.jit
def decode_scales(
    codes, nested_absmax, nested_map, offset, absmax, blocks, PER_NESTED: tl.constexpr, SIZE: tl.constexpr
):
    """absmax f32 [blocks] = nested_map[codes] * nested_absmax of the group + offset."""
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < blocks
    entry = tl.load(nested_map + tl.load(codes + index, mask=inside, other=0).to(tl.int32))
    scale = tl.load(nested_absmax + index // PER_NESTED, mask=inside, other=0.0)
    tl.store(absmax + index, entry * scale + offset, mask=inside)


@triton.jit
def decode_weights(codes, absmax, code_map, out, count, PER_BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Two weights a byte, the even one in the high nibble, each stored by itself."""
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    byte = tl.load(codes + index, mask=inside, other=0).to(tl.int32)
    scale = tl.load(absmax + index // PER_BLOCK, mask=inside, other=0.0)
    kind = out.dtype.element_ty
    tl.store(out + 2 * index, (tl.load(code_map + (byte >> 4)) * scale).to(kind), mask=inside)
    tl.store(out + 2 * index + 1, (tl.load(code_map + (byte & 15)) * scale).to(kind), mask=inside)


@triton.jit
def decode_fused(
    codes,
    absmax,
    nested_absmax,
    nested_map,
    offset,
    code_map,
    out,
    count,
    PER_BLOCK: tl.constexpr,
    PER_NESTED: tl.constexpr,
    SIZE: tl.constexpr,
    JOINED: tl.constexpr,
):
    """Scales and weights at once; JOINED stores both nibbles of a byte together."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    index = start + tl.arange(0, SIZE)
    inside = index < count
    byte = tl.load(codes + index, mask=inside, other=0).to(tl.int32)
    block = index // PER_BLOCK
    entry = tl.load(nested_map + tl.load(absmax + block, mask=inside, other=0).to(tl.int32))
    scale = entry * tl.load(nested_absmax + block // PER_NESTED, mask=inside, other=0.0) + offset
    kind = out.dtype.element_ty
    high = (tl.load(code_map + (byte >> 4)) * scale).to(kind)
    low = (tl.load(code_map + (byte & 15)) * scale).to(kind)
    if JOINED:
        place = 2 * start + tl.arange(0, 2 * SIZE)
        tl.store(out + place, tl.interleave(high, low), mask=place < 2 * count)
    else:
        tl.store(out + 2 * index, high, mask=inside)
        tl.store(out + 2 * index + 1, low, mask=inside)
