"""One typed function per compiled operation: checks its tensors, then calls the kernel on torch's current stream.

All operations work under CUDA graph capture and allocate nothing but their result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from localq import kernels

NF4_BLOCK, NF4_NESTED_BLOCK, NF4_VALUES = 64, 256, 16
GEMV_ROWS = 8
_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}  # csrc/launchers.h, enum Type


def nf4_dequantize(
    codes: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_map: Tensor | None,
    offset: float,
    code_map: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """NF4 weights in `dtype` (float16, bfloat16 or float32) -> [out, in], bit-exact with bitsandbytes.

    codes u8 [out*in/2], absmax u8 [out*in/64] with nested_absmax f32 [ceil(out*in/64/256)], nested_map f32 [256] and
    offset, or absmax f32 and nested_absmax None; code_map f32 [16]. Shapes of codes and absmax count elements only.

    Memory-bound: `nf4_dequantize_bytes` over the memory bandwidth is the floor.
    """
    count = math.prod(shape)
    _check_nf4("nf4_dequantize", codes, absmax, nested_absmax, nested_map, code_map, count)
    if dtype not in _TYPES:
        raise ValueError(f"nf4_dequantize: dtype = {dtype}, must be float16, bfloat16 or float32")
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=codes.device)
    _check("nf4_dequantize", "out", out, codes.device, (dtype,), count)
    _check_cuda("nf4_dequantize", codes)
    kernels.module().nf4_dequantize(
        **_nf4_arguments(codes, absmax, nested_absmax, nested_map, offset, code_map),
        out=out.data_ptr(),
        type=_TYPES[dtype],
        n=count,
        **_place(codes),
    )
    return out


def nf4_gemv(
    x: Tensor,
    codes: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_map: Tensor | None,
    offset: float,
    code_map: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = x W^T + bias for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, out_features] of the same dtype.

    W as in `nf4_dequantize`, bias [out_features] in the dtype of x. Sums in f32, the same bits run after run.

    Memory-bound: `nf4_gemv_bytes` over the memory bandwidth is the floor.
    """
    op = "nf4_gemv"
    if x.dim() != 2 or not 1 <= x.shape[0] <= GEMV_ROWS:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, must be [1 to {GEMV_ROWS}, in]")
    rows, columns = x.shape
    if columns % NF4_BLOCK:
        raise ValueError(f"{op}: x has {columns} columns, must be a multiple of {NF4_BLOCK}")
    _check_nf4(op, codes, absmax, nested_absmax, nested_map, code_map, out_features * columns)
    _check(op, "x", x, codes.device, (torch.float16, torch.bfloat16), rows * columns)
    if bias is not None:
        _check(op, "bias", bias, codes.device, (x.dtype,), out_features)
    if out is None:
        out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    _check(op, "out", out, codes.device, (x.dtype,), rows * out_features)
    _check_cuda(op, codes)
    kernels.module().nf4_gemv(
        x=x.data_ptr(),
        **_nf4_arguments(codes, absmax, nested_absmax, nested_map, offset, code_map),
        bias=0 if bias is None else bias.data_ptr(),
        y=out.data_ptr(),
        type=_TYPES[x.dtype],
        rows=rows,
        out=out_features,
        **{"in": columns},
        **_place(codes),
    )
    return out


def nf4_weight_bytes(count: int, nested: bool = True) -> int:
    """Bytes that `count` NF4 weights are read from: codes and scales; the two small tables are left out."""
    blocks = count // NF4_BLOCK
    scales = blocks + 4 * -(-blocks // NF4_NESTED_BLOCK) if nested else 4 * blocks
    return count // 2 + scales


def nf4_dequantize_bytes(shape: tuple[int, int], dtype: torch.dtype, nested: bool = True) -> int:
    """Bytes that `nf4_dequantize` must move."""
    return nf4_weight_bytes(math.prod(shape), nested) + math.prod(shape) * dtype.itemsize


def nf4_gemv_bytes(rows: int, out: int, columns: int, nested: bool = True, itemsize: int = 2) -> int:
    """Bytes that `nf4_gemv` must move: weights once, x once, y once."""
    return nf4_weight_bytes(out * columns, nested) + itemsize * rows * (out + columns)


def _check_nf4(
    op: str,
    codes: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_map: Tensor | None,
    code_map: Tensor,
    count: int,
) -> None:
    if count <= 0 or count % NF4_BLOCK:
        raise ValueError(f"{op}: the matrix has {count} weights, must be a positive multiple of {NF4_BLOCK}")
    blocks = count // NF4_BLOCK
    _check(op, "codes", codes, codes.device, (torch.uint8,), count // 2)
    _check(op, "code_map", code_map, codes.device, (torch.float32,), NF4_VALUES)
    if nested_absmax is None:
        _check(op, "absmax", absmax, codes.device, (torch.float32,), blocks)
        return
    if nested_map is None:
        raise ValueError(f"{op}: nested_map is None, must be given with nested_absmax")
    _check(op, "absmax", absmax, codes.device, (torch.uint8,), blocks)
    _check(op, "nested_absmax", nested_absmax, codes.device, (torch.float32,), -(-blocks // NF4_NESTED_BLOCK))
    _check(op, "nested_map", nested_map, codes.device, (torch.float32,), NF4_NESTED_BLOCK)


def _check(
    op: str, name: str, tensor: Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...], count: int
) -> None:
    """Dtype, device, size and contiguity, each with the argument's name and what it was."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{op}: {name} is {tensor.dtype}, must be {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, must be on {device}")
    if tensor.numel() != count:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, must have {count} elements")
    if not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} has strides {tensor.stride()}, must be contiguous")


def _check_cuda(op: str, codes: Tensor) -> None:
    """All other tensors are on the device of `codes` by now."""
    if not codes.is_cuda:
        raise ValueError(f"{op}: codes are on {codes.device}, must be on a CUDA device")


def _nf4_arguments(
    codes: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_map: Tensor | None,
    offset: float,
    code_map: Tensor,
) -> dict[str, int | float]:
    nested = nested_absmax is not None
    return {
        "codes": codes.data_ptr(),
        "absmax": absmax.data_ptr(),
        "nested_absmax": nested_absmax.data_ptr() if nested_absmax is not None else 0,
        "nested_map": nested_map.data_ptr() if nested and nested_map is not None else 0,
        "offset": float(offset),
        "code_map": code_map.data_ptr(),
    }


def _place(tensor: Tensor) -> dict[str, int]:
    device = tensor.device.index or 0
    return {"device": device, "stream": torch.cuda.current_stream(tensor.device).cuda_stream}
