"""The formats that the encoder writes, and their constraints on it.

    vq2      `formats/codebooks/vq2.py`, all of its schemes
    aqlm2x8  AQLM with two codebooks of 8 bits for groups of 8 columns (`formats/codebooks/aqlm.py`), for other programs

aqlm2x8 stores the scheme s8l8+s8l8 of vq2 in another layout: every matrix has its own codebooks, and nothing is rotated
at run time, so only rotations that fold into the weights are used. A model in it computes in float16, like published
ones. AQLM rounds a sum of codewords to 16 bits before it multiplies with the scale; the encoder does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from localq.errors import usage_error
from localq.formats.checkpoint import Checkpoint
from localq.formats.codebooks import aqlm, vq2
from localq.formats.codebooks.vq2_codec import ENTRIES, Packed

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
GROUP = 8  # columns of a codeword of aqlm2x8


class TargetFormat(Protocol):
    """A format that the encoder writes. Matrices arrive in vq2, with codebooks of `scheme`, for every format."""

    @property
    def scheme(self) -> str:
        """The vq2 scheme: strides and lengths of the codebooks."""
        ...

    @property
    def name(self) -> str:
        """The name that `--format` takes."""
        ...

    @property
    def rotates(self) -> bool:
        """True if inputs of matrices may be rotated at run time."""
        ...

    @property
    def shares(self) -> bool:
        """True if matrices that read the same input share their codebooks."""
        ...

    def dtype(self, stated: str) -> str:
        """Return the dtype of unquantized tensors; stated: the source's."""
        ...

    def layout(self, out: int, columns: int, *, signs: bool) -> Layout:
        """Return suffix -> (dtype, shape) of the tensors of a matrix [out, columns]."""
        ...

    def to_tensors(self, packed: Packed, prefix: str, home: str) -> dict[str, Tensor]:
        """Return the checkpoint tensors of a Linear, on the CPU; home: the Linear that owns the codebooks."""
        ...

    def from_checkpoint(self, checkpoint: Checkpoint, prefix: str) -> Packed:
        """Read the matrix that `to_tensors` wrote."""
        ...

    def quantization_config(self, dtype: str, unquantized: Iterable[str]) -> dict[str, Any]:
        """Return that entry of config.json; unquantized: modules whose weights are copied."""
        ...


@dataclass(frozen=True)
class Vq2Format:
    """vq2 in one of its schemes."""

    scheme: str = "s4l16"
    name = "vq2"
    rotates = True
    shares = True

    def dtype(self, stated: str) -> str:
        """Return the source's dtype."""
        return stated

    def layout(self, out: int, columns: int, *, signs: bool) -> Layout:
        """Return the tensors of a matrix by suffix; with signs where its input is rotated."""
        return vq2.layout(out, columns, self.scheme, signs=signs)

    def to_tensors(self, packed: Packed, prefix: str, home: str) -> dict[str, Tensor]:
        """Return the checkpoint tensors of the Linear `prefix`, on the CPU."""
        return vq2.to_tensors(packed, prefix, home)

    def from_checkpoint(self, checkpoint: Checkpoint, prefix: str) -> Packed:
        """Read the matrix `prefix`."""
        return vq2.from_checkpoint(checkpoint, prefix)

    def quantization_config(self, dtype: str, unquantized: Iterable[str]) -> dict[str, Any]:
        """Return that entry of config.json, which names the head alone as unquantized."""
        return vq2.quantization_config(dtype, ["lm_head"])


@dataclass(frozen=True)
class Aqlm2x8Format:
    """AQLM with two codebooks of 8 bits."""

    scheme: str = "s8l8+s8l8"
    name = "aqlm2x8"
    rotates = False
    shares = False

    def dtype(self, stated: str) -> str:
        """Return float16, in which AQLM's kernels compute."""
        return "float16"

    def layout(self, out: int, columns: int, *, signs: bool) -> Layout:
        """Return the tensors of a matrix by suffix. Raises ValueError for signs."""
        if signs:
            raise ValueError("AQLM has no signs")
        shapes = (out, columns // GROUP, 2), (2, ENTRIES, 1, GROUP), (out, 1, 1, 1)
        dtypes = torch.int8, torch.float16, torch.float16
        return dict(zip(aqlm.suffixes, zip(dtypes, shapes, strict=True), strict=True))

    def to_tensors(self, packed: Packed, prefix: str, home: str) -> dict[str, Tensor]:
        """Return the checkpoint tensors of the Linear `prefix`, which is its own home."""
        codes = torch.stack([codes for codes, _ in packed.books], -1).view(torch.int8)
        codebooks = torch.stack([codebook[:, None] for _, codebook in packed.books])
        parts = codes, codebooks, packed.scales.view(-1, 1, 1, 1)
        return {prefix + suffix: part.cpu() for suffix, part in zip(aqlm.suffixes, parts, strict=True)}

    def from_checkpoint(self, checkpoint: Checkpoint, prefix: str) -> Packed:
        """Read the matrix `prefix` as one of vq2."""
        stored = aqlm.from_checkpoint(checkpoint, prefix)
        codes = stored.codes.view(torch.uint8).unbind(-1)
        books = zip(codes, stored.codebooks.flatten(2), strict=True)
        pairs = tuple((numbers.contiguous(), codebook) for numbers, codebook in books)
        return Packed(pairs, stored.scales.flatten(), None, stored.shape)

    def quantization_config(self, dtype: str, unquantized: Iterable[str]) -> dict[str, Any]:
        """Return that entry of config.json, with names of weights for transformers 4 and of modules for 5."""
        modules = sorted({*unquantized, "lm_head"})
        return {
            "quant_method": aqlm.quant_method,
            "in_group_size": GROUP,
            "out_group_size": 1,
            "num_codebooks": 2,
            "nbits_per_codebook": 8,
            "linear_weights_not_to_quantize": [*modules, *(f"{module}.weight" for module in modules)],
        }


def target_format(format: str, scheme: str = "s4l16") -> TargetFormat:
    """Return the format that `--format` names; scheme: of vq2 only. Raises LocalqError (exit 2) for other formats."""
    targets: dict[str, TargetFormat] = {each.name: each for each in (Vq2Format(scheme), Aqlm2x8Format())}
    if format not in targets:
        raise usage_error(
            format, "layer-by-layer quantization does not support this format", f"Formats: {', '.join(targets)}."
        )
    return targets[format]
