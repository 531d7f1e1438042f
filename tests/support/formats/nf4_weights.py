"""Weights that NF4 is made of in tests."""

from __future__ import annotations

import torch
from torch import Tensor


def sample(out: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Like a real weight: small, with outliers, an all-zero block and a tiny block."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, columns, generator=generator) * 0.02
    weight[0, 3], weight[-1, -1] = 3.0, -7.5
    weight[out // 2, :64] = 0
    weight[out // 3, :64] *= 1e-4
    return weight.to(dtype)
