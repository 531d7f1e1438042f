"""Matrices with scales apart from their codes, for tests of kernels: random tensors of every kind, tiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localq.formats.nvfp4 import codec as nvfp4
from localq.formats.samples import Random
from localq.formats.scaled import tiles
from localq.formats.scaled.kernel import KINDS, ROWS, ScaledOperand

HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3 = torch.float8_e4m3fn
VARIANTS = (*KINDS, "nvfp4, divided")
GROUPS = {"int8 g32": 32, "int8 g64": 64, "int8 g128": 128}


@dataclass(frozen=True)
class ScaledSample:
    """A matrix row by row, tiled, and as the definition has it in f32."""

    plain: ScaledOperand
    matrix: ScaledOperand
    weight: Tensor

    @property
    def dense(self) -> Tensor:
        """f64 [out, in]"""
        return self.weight.double()


def make(shape: tuple[int, int], variant: str, seed: int = 0, through: torch.dtype = F32) -> ScaledSample:
    """Random codes, scales, zero points and factors; every finite code and scale occurs in matrices of some size."""
    kind = variant.partition(",")[0]
    plain = _nvfp4(shape, variant, seed) if kind == "nvfp4" else _bytes(shape, kind, seed)
    plain = replace(plain, through=through)
    weight = _weight(plain)
    held = [None if each is None else each.clone() for each in (plain.codes, plain.scales, plain.zeros)]
    assert held[0] is not None
    tiles.tile_(kind, held[0], held[1], held[2])
    return ScaledSample(plain, replace(plain, codes=held[0], scales=held[1], zeros=held[2]), weight)


def weight_of_tiles(matrix: ScaledOperand) -> Tensor:
    """f32 [out, in], rounded to the type that the definition names."""
    codes, scales, zeros = tiles.untile(matrix.kind, matrix.codes, matrix.scales, matrix.zeros)
    return _weight(replace(matrix, codes=codes, scales=scales, zeros=zeros))


def _nvfp4(shape: tuple[int, int], variant: str, seed: int) -> ScaledOperand:
    packed = nvfp4.sample(shape, seed, scheme="divided" if variant.endswith("divided") else "")
    scales = Random(seed, "cpu").integers(0, 0x7F, *packed.scales.shape)  # every finite positive e4m3
    return ScaledOperand("nvfp4", packed.codes, scales, None, packed.factor, divides=packed.divides)


def _bytes(shape: tuple[int, int], kind: str, seed: int) -> ScaledOperand:
    (out, columns), random = shape, Random(seed, "cpu")
    codes = random.codes(out, columns)
    if kind.startswith("fp8"):
        codes[codes & 0x7F == 0x7F] = 0x35  # NaN
    scales = zeros = factors = None
    if kind == "fp8 blocks":
        scales = random.scales(0.01, out // ROWS, columns // 64, dtype=F32, spread=0.9)
    elif KINDS[kind].factors == "rows":
        factors = random.scales(0.01, out, dtype=F32, spread=0.9)
    else:
        groups = columns // GROUPS[kind]
        signs = random.integers(0, 2, groups, out) * 2.0 - 1
        scales, zeros = random.scales(0.01, groups, out, dtype=F32, spread=0.9) * signs, random.codes(groups, out)
    return ScaledOperand(kind, codes, scales, zeros, factors)


def _weight(plain: ScaledOperand) -> Tensor:
    """Written out for each kind."""
    if plain.kind == "nvfp4":
        return nvfp4.dequantize(nvfp4.Packed(plain.codes, plain.scales, plain.factors, plain.divides), F32)
    if plain.kind == "fp8 blocks":
        values = plain.codes.view(E4M3).float()
        grid = plain.scales.view(len(values) // ROWS, -1)
        weight = values * grid.repeat_interleave(ROWS, 0).repeat_interleave(64, 1)
    elif plain.kind == "fp8 rows":
        weight = plain.codes.view(E4M3).float() * plain.factors[:, None]
    elif plain.kind == "int8 rows":
        weight = (plain.codes.float() - 128) * plain.factors[:, None]
    else:
        of_columns = [each.T.float().repeat_interleave(GROUPS[plain.kind], 1) for each in (plain.scales, plain.zeros)]
        weight = (plain.codes.float() - of_columns[1]) * of_columns[0]
    return weight.to(plain.through).float()
