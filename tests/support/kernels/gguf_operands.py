"""GGUF matrices for tests of kernels: random blocks, tiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from localq.formats.gguf import codec, tiles
from localq.formats.gguf.codec import Packed
from localq.formats.gguf.kernel import GgufOperand
from localq.formats.gguf.samples import sample


@dataclass(frozen=True)
class GgufSample:
    """A matrix as in the file, tiled, and in f64."""

    packed: Packed
    matrix: GgufOperand

    @property
    def dense(self) -> torch.Tensor:
        """f64 [out, in]; the f32 weights of the definition."""
        return codec.dequantize(self.packed, torch.float32).double()


def make(shape: tuple[int, int], type: str, seed: int = 0) -> GgufSample:
    """Of random codes and scales, as `localq.formats.gguf.sample` makes them."""
    packed = sample(shape, seed, scheme=type)
    return GgufSample(packed, GgufOperand(tiles.tile(packed.blocks, type), type))
