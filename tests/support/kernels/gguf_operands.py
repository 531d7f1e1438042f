"""GGUF matrices for tests of kernels: random blocks, tiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localq.formats.gguf import codec, tiles
from localq.formats.gguf.codec import Packed
from localq.formats.gguf.experts_kernel import GgufStack, gguf_stack
from localq.formats.gguf.kernel import GgufOperand
from localq.formats.gguf.samples import sample

SOURCES = ("gemv", "gemv_32", "gemv_256", "gemv_grid", "gemv_nvfp4", "gemv_ternary", "dequantize", "experts",
           "experts_32", "experts_256", "experts_grid", "experts_nvfp4", "experts_ternary")  # fmt: skip  # of csrc/gguf


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
    return GgufSample(packed, GgufOperand(tiles.tile(packed.blocks, type), type, factor=packed.factor))


def experts(
    count: int, parts: int, shape: tuple[int, int], type: str, seed: int = 0, device: str = "cpu", up_type: str = ""
) -> tuple[GgufStack, Tensor]:
    """A stack of matrices [count][parts], and its weights f32 [count, parts * out, in], on the device.

    up_type   of the second part, if it differs
    """
    types = (type, up_type or type)[:parts]
    made = [[make(shape, each, seed + 10 * expert + part) for part, each in enumerate(types)]
            for expert in range(count)]  # fmt: skip
    dense = torch.stack([torch.cat([each.dense for each in some]) for some in made]).float()
    on_device = [[replace(each.matrix, blocks=each.matrix.blocks.to(device)) for each in some] for some in made]
    return gguf_stack(on_device), dense.to(device)


def dense_of(stack: GgufStack) -> Tensor:
    """f32 [E, out, in]."""
    return torch.stack([torch.cat([weights_of(each) for each in some]) for some in stack.matrices])


def weights_of(matrix: GgufOperand) -> Tensor:
    """f32 [out, in] of a matrix in tiles."""
    packed = Packed(tiles.untile(matrix.blocks, matrix.type), matrix.type, factor=matrix.factor)
    return codec.dequantize(packed, torch.float32)
