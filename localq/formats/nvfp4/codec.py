"""The arithmetic of NVFP4: dequantize, random weights. The format is specified in `formats.nvfp4`.

Works on whatever device the tensors are on; rows are worked on in chunks that bound the temporaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localq.formats.mxfp4.codec import VALUES
from localq.formats.samples import Random

GROUP = 16  # columns that share a scale
LARGEST_SCALE = 448.0  # of e4m3
# Weights that are worked on together. On a GPU their temporaries stay within `Format.unpack_bytes`.
CHUNK_WEIGHTS = {"cpu": 2**18, "cuda": 2**21}


@dataclass(frozen=True)
class Packed:
    """One matrix.

    codes    u8 [out, in/2]    the even column is the low nibble
    scales   u8 [out, in/16]   the bits of e4m3
    factor   f32 [1]
    divides  a scale is divided by the factor, not multiplied
    """

    codes: Tensor
    scales: Tensor
    factor: Tensor
    divides: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.codes.nbytes + self.scales.nbytes + self.factor.nbytes

    def to(self, device: torch.device | str) -> Packed:
        """The same on `device`."""
        return self._each(lambda tensor: tensor.to(device))

    def placed(self, place: Callable[[Tensor], Tensor], device: torch.device) -> Packed:
        """The same on `device`, every tensor where `place` copies it."""
        return self._each(place)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Packed:
        return replace(self, codes=change(self.codes), scales=change(self.scales), factor=change(self.factor))


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain: every code, equally often; scales of all mantissas.

    scheme   "divided" for a factor that divides, as compressed-tensors has it
    """
    (out, columns), random, divides = shape, Random(seed, device), scheme == "divided"
    codes = random.codes(out, columns // 2)
    scales = random.scales(1.0, out, columns // GROUP, dtype=torch.float32, spread=0.5).to(torch.float8_e4m3fn)
    power = float(VALUES.square().mean() * scales.float().square().mean())  # of a weight without the factor
    gain = (power * columns) ** -0.5
    factor = torch.full((1,), 1 / gain if divides else gain, device=codes.device)
    return Packed(codes, scales.view(torch.uint8), factor, divides)


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The matrix that `packed` stands for: [out, in] of `dtype`, on its device. This is the definition."""
    return dequantize_rows(packed, 0, torch.empty(packed.shape, dtype=dtype, device=packed.codes.device))


def dequantize_rows(packed: Packed, first: int, out: Tensor) -> Tensor:
    """Rows of the matrix from `first` on into `out` [count, in], and `out`."""
    step = max(CHUNK_WEIGHTS.get(packed.codes.device.type, 2**18) // out.shape[1], 1)
    pairs = torch.stack((VALUES.repeat(16), VALUES.repeat_interleave(16)), -1).to(packed.codes.device)
    for begin in range(0, len(out), step):
        part = out[begin : begin + step]
        part.copy_(_chunk(packed, slice(first + begin, first + begin + len(part)), pairs))
    return out


def _chunk(packed: Packed, rows: slice, pairs: Tensor) -> Tensor:
    """Some rows in f32.

    A function of its own, so that the temporaries of one chunk are gone when the next begins.
    """
    codes, scales = packed.codes[rows], packed.scales[rows].view(torch.float8_e4m3fn).float()
    scales = scales / packed.factor if packed.divides else scales * packed.factor
    values = pairs.index_select(0, codes.reshape(-1).int()).view(len(codes), -1, GROUP)
    return values.mul_(scales.unsqueeze(-1)).flatten(1)
