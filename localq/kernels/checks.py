"""Helpers of compiled operations' wrappers: tensor checks by name, and a launch's device and stream."""

from __future__ import annotations

import torch
from torch import Tensor

TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}  # csrc/common/types.h
HALF_TYPES = (torch.float16, torch.bfloat16)


def check(
    op: str, name: str, tensor: Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...], count: int
) -> None:
    """Dtype, device, size and contiguity; raises ValueError with the argument's name and what it was."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{op}: {name} is {tensor.dtype}, must be {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, must be on {device}")
    if tensor.numel() != count:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, must have {count} elements")
    if not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} has strides {tensor.stride()}, must be contiguous")


def check_cuda(op: str, name: str, tensor: Tensor) -> None:
    """The tensor that all others must share the device with is on a GPU."""
    if not tensor.is_cuda:
        raise ValueError(f"{op}: {name} are on {tensor.device}, must be on a CUDA device")


def check_slab(op: str, dtype: torch.dtype, rows: tuple[int, int] | None, out: int) -> tuple[int, int]:
    """First and count of the rows, of `out`, that are dequantized to `dtype`: all where `rows` is None."""
    if dtype not in TYPES:
        raise ValueError(f"{op}: dtype = {dtype}, must be float16, bfloat16 or float32")
    first, count = (0, out) if rows is None else rows
    if not (first >= 0 and 0 < count <= out - first):
        raise ValueError(f"{op}: rows = {(first, count)}, must lie within {out}")
    return first, count


def addresses(**tensors: Tensor | None) -> dict[str, int]:
    """Name -> where the tensor lies; 0 for None."""
    return {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


def place(tensor: Tensor) -> dict[str, int]:
    """Device and stream of a launch: torch's current stream on the device of `tensor`."""
    device = tensor.device.index or 0
    return {"device": device, "stream": _stream_of(device)}


def _public_stream_of(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# What torch's own compiler asks for a stream with: a fifth of the time of a `Stream`, and a prompt launches thousands.
_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream_of)


def slab_arguments(first: int, out: Tensor) -> dict[str, int]:
    """Rows of a matrix from `first` on, dequantized into `out` [count, in], as the bindings take them."""
    return {"out": out.data_ptr(), "type": TYPES[out.dtype], "row_begin": first, "row_count": out.shape[0]}


class PackedRows:
    """A matrix whose `codes` have a row for each of its own."""

    codes: Tensor

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.codes.shape[0]


class NibbleRows(PackedRows):
    """A matrix whose `codes` are u8 [out, in/2]."""

    @property
    def in_features(self) -> int:
        """Columns."""
        return 2 * self.codes.shape[1]
