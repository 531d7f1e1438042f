"""A draft model to plan for, or the MTP block of a model, beside the model that it drafts for. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from localq.drafts import MTP
from localq.files.architecture import Architecture
from localq.files.linears import Linears


@dataclass(frozen=True)
class DraftShape:
    """A draft model to plan for.

    weights   exact bytes of all weights without embedding and head, if known
    on_gpu    False: in RAM, where every format is dequantized
    is_block  it is an MTP block, as `of_block` makes it
    """

    name: str
    arch: Architecture
    format: str
    scheme: str = ""
    weights: int | None = None
    on_gpu: bool = True
    is_block: bool = False

    @classmethod
    def of_block(cls, arch: Architecture, format: str, scheme: str = "") -> DraftShape:
        """The MTP block of a model of this shape (`models.qwen3_5_mtp`): a layer of attention, and what joins its two
        inputs; embedding and head are those of the model."""
        alone = replace(arch, layers=1, recurrent_layers=0, recurrent=(), tied=True, stored_head=0)
        return cls(MTP, alone, format, scheme, is_block=True)

    @property
    def joint(self) -> tuple[Linears, int]:
        """Of an MTP block: the matrix that joins its two inputs, and the weights of their norms."""
        hidden = self.arch.hidden
        return Linears("joint", hidden, 2 * hidden, 1), 2 * hidden

    def on_cpu(self, itemsize: int) -> DraftShape:
        """The same in RAM, in a type of `itemsize` bytes."""
        if not self.on_gpu:
            return self
        arch = replace(self.arch, stored_head=0)
        weights = itemsize * (arch.linear_parameters + arch.other_parameters)
        if self.is_block:
            matrix, norms = self.joint
            weights += itemsize * (matrix.parameters + norms)
        return replace(self, arch=arch, format="bf16", scheme="", weights=weights, on_gpu=False)
