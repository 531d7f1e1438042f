"""The tiled order of weights with scales apart from their codes: as the kernels read them (csrc/scaled/layout.cuh).

Bytes move within 16 rows, so `untile_` undoes `tile_` bit for bit, and both take as much memory as before. For matrices
of whole tiles (`kernel.fits`). Works on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localq.formats.scaled.kernel import KINDS, ROWS

TILED_AT_A_TIME = 2**24  # bytes of codes, which temporaries have twice


def tile_(kind: str, codes: Tensor, scales: Tensor | None, zeros: Tensor | None) -> None:
    """Put the tensors of a matrix into the tiled order, in their memory."""
    _change(codes, _tile_nibbles if KINDS[kind].codes_a_byte == 2 else _tile_bytes)
    if kind == "nvfp4":
        assert scales is not None
        _change(scales, _tile_scales)
    for tensor in (scales, zeros):
        if tensor is not None and kind.startswith("int8"):
            tensor.copy_(_tile_groups(tensor))


def untile(kind: str, codes: Tensor, scales: Tensor | None, zeros: Tensor | None
           ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The inverse of `tile_`, in new tensors; scales and zero points of groups as [groups, out]."""
    codes = (_untile_nibbles if KINDS[kind].codes_a_byte == 2 else _untile_bytes)(codes)
    if kind == "nvfp4":
        assert scales is not None
        return codes, _untile_scales(scales.view(len(codes), -1)), None
    if kind.startswith("int8"):
        of_groups = [None if each is None else _untile_groups(each.view(-1, len(codes))) for each in (scales, zeros)]
        return codes, of_groups[0], of_groups[1]
    return codes, scales, zeros


def _change(tensor: Tensor, change: object) -> None:
    """Some tiles at a time."""
    assert callable(change)
    rows = max(1, TILED_AT_A_TIME // (ROWS * tensor.shape[1])) * ROWS
    for first in range(0, len(tensor), rows):
        part = tensor[first : first + rows]
        part.copy_(change(part))


def _tile_bytes(codes: Tensor) -> Tensor:
    """u8 [out, in] -> the same shape."""
    # [tile, half, g, run, t, word, second pair, second of it] -> [tile, run, g, t, word, half, second of it, pair]
    axes = codes.reshape(-1, 2, 8, codes.shape[1] // 32, 4, 2, 2, 2)
    return axes.permute(0, 3, 2, 4, 5, 1, 7, 6).reshape(codes.shape)


def _untile_bytes(codes: Tensor) -> Tensor:
    """The inverse of `_tile_bytes`."""
    axes = codes.reshape(-1, codes.shape[1] // 32, 8, 4, 2, 2, 2, 2)
    return axes.permute(0, 5, 2, 1, 3, 4, 7, 6).reshape(codes.shape)


def _tile_nibbles(codes: Tensor) -> Tensor:
    """u8 [out, in/2] -> the same shape. A byte of a word has one column of rows g and g + 8."""
    rows = codes.reshape(-1, 2, 8, codes.shape[1] // 32, 4, 4, 2)  # [tile, half, g, block, t, word, pair]
    low, high = rows[:, 0], rows[:, 1]
    even = (low & 15) | (high << 4)
    odd = (low >> 4) | (high & 240)
    # [tile, g, block, t, word, pair, column of it] -> [tile, block, g, t, word, column, pair]
    return torch.stack((even, odd), -1).permute(0, 2, 1, 3, 4, 6, 5).reshape(codes.shape)


def _untile_nibbles(codes: Tensor) -> Tensor:
    """The inverse of `_tile_nibbles`."""
    words = codes.reshape(-1, codes.shape[1] // 32, 8, 4, 4, 2, 2).permute(0, 2, 1, 3, 4, 6, 5)
    even, odd = words[..., 0], words[..., 1]
    low = (even & 15) | (odd << 4)
    high = (even >> 4) | (odd & 240)
    return torch.stack((low, high), 1).reshape(codes.shape)


def _tile_scales(scales: Tensor) -> Tensor:
    """u8 [out, in/16] -> the same shape."""
    axes = scales.reshape(-1, 2, 8, scales.shape[1] // 4, 4)  # [tile, half, g, block, t]
    return axes.permute(0, 3, 2, 4, 1).reshape(scales.shape)


def _untile_scales(scales: Tensor) -> Tensor:
    """The inverse of `_tile_scales`."""
    axes = scales.reshape(-1, scales.shape[1] // 4, 8, 4, 2)
    return axes.permute(0, 4, 2, 1, 3).reshape(scales.shape)


def _tile_groups(values: Tensor) -> Tensor:
    """[groups, out] -> the same shape, [tile, group, g, half]."""
    return values.view(len(values), -1, 2, 8).permute(1, 0, 3, 2).reshape(values.shape)


def _untile_groups(values: Tensor) -> Tensor:
    """The inverse of `_tile_groups`."""
    return values.reshape(-1, len(values), 8, 2).permute(1, 0, 3, 2).reshape(values.shape)
