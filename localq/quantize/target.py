"""The formats that the encoder writes, and what each of them leaves to it.

    vq2      `quant/vq2.py`, all of its schemes
    aqlm2x8  AQLM with two codebooks of 8 bits for groups of 8 columns (`quant/aqlm.py`), for programs that read AQLM

AQLM's is the scheme s8l8+s8l8 of vq2 stored otherwise: every matrix has codebooks of its own, and nothing is rotated
when the model runs, so only what can be folded into the weights is. A model in it computes in float16, as those that
are published do. AQLM rounds a sum of codewords to 16 bits before it multiplies with the scale; the encoder does not.
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


class Target(Protocol):
    """A format to write. Matrices are those of vq2, with books of `scheme`, whatever the format."""

    @property
    def scheme(self) -> str:
        """Of vq2: strides and lengths of the books."""
        ...

    @property
    def name(self) -> str:
        """What `--format` calls it."""
        ...

    @property
    def rotates(self) -> bool:
        """May inputs of matrices be rotated when the model runs?"""
        ...

    @property
    def shares(self) -> bool:
        """Do matrices that read the same input have their codebooks in common?"""
        ...

    def dtype(self, stated: str) -> str:
        """Of what stays unquantized; stated: the source's."""
        ...

    def layout(self, out: int, columns: int, *, signs: bool) -> Layout:
        """Suffix -> (dtype, shape) of what `to_tensors` makes of a matrix [out, columns]."""
        ...

    def to_tensors(self, packed: Packed, prefix: str, home: str) -> dict[str, Tensor]:
        """The checkpoint tensors of the Linear `prefix`, on the CPU; home: whose codebooks they are."""
        ...

    def from_checkpoint(self, checkpoint: Checkpoint, prefix: str) -> Packed:
        """What `to_tensors` took."""
        ...

    def quantization_config(self, dtype: str, unquantized: Iterable[str]) -> dict[str, Any]:
        """config.json's entry of that name. unquantized: modules with weights that stay as they are."""
        ...


@dataclass(frozen=True)
class Vq2:
    """See the module."""

    scheme: str = "s4l16"
    name = "vq2"
    rotates = True
    shares = True

    def dtype(self, stated: str) -> str:
        """See `Target`."""
        return stated

    def layout(self, out: int, columns: int, *, signs: bool) -> Layout:
        """See `Target`."""
        return vq2.layout(out, columns, self.scheme, signs=signs)

    def to_tensors(self, packed: Packed, prefix: str, home: str) -> dict[str, Tensor]:
        """See `Target`."""
        return vq2.to_tensors(packed, prefix, home)

    def from_checkpoint(self, checkpoint: Checkpoint, prefix: str) -> Packed:
        """See `Target`."""
        return vq2.from_checkpoint(checkpoint, prefix)

    def quantization_config(self, dtype: str, unquantized: Iterable[str]) -> dict[str, Any]:
        """See `Target`."""
        return vq2.quantization_config(dtype, ["lm_head"])


@dataclass(frozen=True)
class Aqlm2x8:
    """See the module."""

    scheme: str = "s8l8+s8l8"
    name = "aqlm2x8"
    rotates = False
    shares = False

    def dtype(self, stated: str) -> str:
        """See `Target`."""
        return "float16"

    def layout(self, out: int, columns: int, *, signs: bool) -> Layout:
        """See `Target`."""
        if signs:
            raise ValueError("AQLM has no signs")
        shapes = (out, columns // GROUP, 2), (2, ENTRIES, 1, GROUP), (out, 1, 1, 1)
        dtypes = torch.int8, torch.float16, torch.float16
        return dict(zip(aqlm.suffixes, zip(dtypes, shapes, strict=True), strict=True))

    def to_tensors(self, packed: Packed, prefix: str, home: str) -> dict[str, Tensor]:
        """See `Target`; home is the Linear itself."""
        codes = torch.stack([codes for codes, _ in packed.books], -1).view(torch.int8)
        codebooks = torch.stack([codebook[:, None] for _, codebook in packed.books])
        parts = codes, codebooks, packed.scales.view(-1, 1, 1, 1)
        return {prefix + suffix: part.cpu() for suffix, part in zip(aqlm.suffixes, parts, strict=True)}

    def from_checkpoint(self, checkpoint: Checkpoint, prefix: str) -> Packed:
        """See `Target`."""
        stored = aqlm.from_checkpoint(checkpoint, prefix)
        codes = stored.codes.view(torch.uint8).unbind(-1)
        books = zip(codes, stored.codebooks.flatten(2), strict=True)
        pairs = tuple((numbers.contiguous(), codebook) for numbers, codebook in books)
        return Packed(pairs, stored.scales.flatten(), None, stored.shape)

    def quantization_config(self, dtype: str, unquantized: Iterable[str]) -> dict[str, Any]:
        """See `Target`. transformers compared names of weights before its release 5, and those of modules since."""
        modules = sorted({*unquantized, "lm_head"})
        return {
            "quant_method": aqlm.quant_method,
            "in_group_size": GROUP,
            "out_group_size": 1,
            "num_codebooks": 2,
            "nbits_per_codebook": 8,
            "linear_weights_not_to_quantize": [*modules, *(f"{module}.weight" for module in modules)],
        }


def target_of(format: str, scheme: str = "s4l16") -> Target:
    """The target that `--format` names; scheme: of vq2 alone. Raises LocalqError (exit 2) for others."""
    targets: dict[str, Target] = {each.name: each for each in (Vq2(scheme), Aqlm2x8())}
    if format not in targets:
        raise usage_error(format, "this is not made on calibration text", f"Formats that are: {', '.join(targets)}.")
    return targets[format]
