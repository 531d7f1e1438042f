"""Experts that a checkpoint holds quantized: which parameters they become, whether they fit, and putting them there.

The matrices of a layer's experts are one tensor, in the checkpoint and in the model (`models.experts`). They are
dequantized when they are read: models with experts run on the CPU, where that is the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from localq.checkpoint import Checkpoint
from localq.errors import bad_file
from localq.quant import STACKS


@dataclass(frozen=True)
class Stack:
    """A stack in a quantized format: the module that reads it, its name in the checkpoint, and its tensors' names."""

    format: str
    module: ModuleType
    name: str
    keys: tuple[str, ...]

    def stored_bytes(self, checkpoint: Checkpoint) -> int:
        """Bytes in the checkpoint."""
        count: int = self.module.stored_bytes(checkpoint.tensors, self.name)
        return count

    def read(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Tensor:
        """[experts, in, out], dequantized."""
        weight: Tensor = self.module.dequantized(checkpoint, self.name, dtype)
        return weight


def find(checkpoint: Checkpoint, rename: Callable[[str], str | None]) -> dict[str, Stack]:
    """Parameter name -> the stack that becomes it. `rename` as of `weights.assign`."""
    found = {}
    for key in checkpoint.tensors:
        for format, module in STACKS.items():
            name = key.removesuffix(module.suffixes[0])
            if name == key or not module.is_quantized(checkpoint.tensors, name):
                continue
            keys = tuple(name + suffix for suffix in module.suffixes if name + suffix in checkpoint.tensors)
            if (target := rename(name)) is not None:
                found[target] = Stack(format, module, name, keys)
    return found


def check(
    stacks: Mapping[str, Stack], checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]], model: str
) -> None:
    """Raises LocalqError (exit 8) where a stack has not the shape that is `wanted` of its parameter."""
    for target, stack in stacks.items():
        found = stack.module.stored_shape(checkpoint, stack.name)
        if found != wanted[target]:
            why = f"the experts {stack.name!r} have shape {list(found)}, not {list(wanted[target])}"
            raise bad_file(model, why, "Fetch the model again.")
