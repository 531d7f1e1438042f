"""Matrices in NVFP4 as llama.cpp's converter writes them: blocks, and factors of matrices in tensors of their own."""

from __future__ import annotations

import numpy as np
import torch

VALUES = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6), np.float32)  # of E2M1
LARGEST = 6 * 64  # of a matrix over its factor, so that scales of 16 columns use their range


def factors_of(values: np.ndarray) -> np.ndarray:
    """f32 [1] of a matrix, [E] of a stack."""
    matrices = values.reshape(-1, values.shape[-2] * values.shape[-1])
    return (np.abs(matrices).max(-1) / LARGEST).astype(np.float32)


def quantize(values: np.ndarray) -> np.ndarray:
    """f32 [..., columns] -> u8 [..., columns / 64 * 36]."""
    groups = values.reshape(-1, 4, 16)
    scales = torch.from_numpy(np.abs(groups).max(-1) / 6).to(torch.float8_e4m3fn)
    by = np.maximum(scales.float().numpy(), 1e-6)[..., None]
    codes = (
        np.abs(np.abs(groups / by)[..., None] - VALUES).argmin(-1).astype(np.uint8) | (groups < 0).astype(np.uint8) << 3
    )
    packed = (codes[..., :8] | codes[..., 8:] << 4).reshape(-1, 32)
    return np.concatenate((scales.view(torch.uint8).numpy(), packed), 1).reshape(*values.shape[:-1], -1)


def stored(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a matrix or stack `name`; that of factors for activations is there too, as in real files."""
    factors, part = factors_of(values), name.removesuffix(".weight")
    shape = (-1, *(1,) * (values.ndim - 1)) if values.ndim == 3 else (1, 1)
    return {
        name: quantize(values / factors.reshape(shape)),
        f"{part}.scale": factors,
        f"{part}.input_scale": np.full(len(factors), 7.0, np.float32),
    }
