"""Random numbers for the `sample` of the formats: the same for a seed and a kind of device."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

SPREAD = 0.1  # scales lie within this share of their mean


class Random:
    """Tensors of random numbers on one device, drawn one after the other."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._generator = Generator(self.device).manual_seed(seed)

    def codes(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Every number of an integer type, equally often."""
        limits = torch.iinfo(dtype)
        return self.integers(limits.min, limits.max + 1, *shape, dtype=dtype)

    def integers(self, low: int, end: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """low .. end - 1, equally often."""
        return torch.randint(low, end, shape, dtype=dtype, device=self.device, generator=self._generator)

    def nibbles(self, *shape: int) -> Tensor:
        """u8 [..., n]: two codes of 4 bits each, 1 to 15, whose mean is 8: 8 stands for every 0.

        A mean that is not zero adds up along wide matrices: qwen3-32b in AWQ overflowed float16 at its first token.
        """
        drawn = self.codes(*shape)
        some = (drawn | drawn >> 1 | drawn >> 2 | drawn >> 3) & 0x11  # of each code: is it not 0?
        return drawn | (some ^ 0x11) << 3

    def normal(self, *shape: int, deviation: float = 1.0, dtype: torch.dtype = torch.float16) -> Tensor:
        """Gaussian numbers."""
        drawn = torch.randn(shape, dtype=torch.float32, device=self.device, generator=self._generator)
        return drawn.mul_(deviation).to(dtype)

    def scales(self, mean: float, *shape: int, dtype: torch.dtype = torch.float16, spread: float = SPREAD) -> Tensor:
        """Positive numbers within the share `spread` of `mean`."""
        drawn = torch.rand(shape, device=self.device, generator=self._generator)
        return drawn.mul_(2 * spread).add_(1 - spread).mul_(mean).to(dtype)

    def permutation(self, count: int) -> Tensor:
        """0 .. count - 1 in random order, i16: the bits of a u16."""
        order = torch.randperm(count, device=self.device, generator=self._generator)
        return (order - (order >= 2**15) * 2**16).to(torch.int16)
