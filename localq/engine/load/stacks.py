"""Quantized experts of a checkpoint: the parameters they become, shape checks, and placing them.

The matrices of a layer's experts are one stack, in the checkpoint and in the model (`models.experts`). On a GPU it
stays in its format, as the rows of one tall matrix or, with codebooks, as Linears; on the CPU it is dequantized at load
time, which is the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeGuard

import torch
from torch import Tensor

from localq.engine.load.expert_pieces import LINEARS, ExpertPieces
from localq.engine.load.shared import SharedTensors
from localq.errors import bad_file
from localq.formats import FORMATS, STACKS
from localq.formats.checkpoint import Checkpoint
from localq.formats.expert_linears import LinearStack
from localq.formats.linear import SlabStack
from localq.models.decoder import Decoder
from localq.models.experts import Experts


@dataclass(frozen=True)
class ExpertStack:
    """A stack of experts in a quantized format: its module, its checkpoint name, and its tensors' names."""

    format: str
    module: ModuleType
    name: str
    keys: tuple[str, ...]
    shared: tuple[str, ...] = ()  # tensors that other matrices may read too

    def stored_bytes(self, checkpoint: Checkpoint) -> int:
        """Bytes in the checkpoint."""
        count: int = self.module.stored_bytes(checkpoint.tensors, self.name)
        return count

    def shape(self, checkpoint: Checkpoint) -> tuple[int, int, int]:
        """[experts, out, in]; raises LocalqError (exit 8) where its tensors do not fit together."""
        shape: tuple[int, int, int] = self.module.stored_shape(checkpoint, self.name)
        return shape

    def placed_bytes(self, checkpoint: Checkpoint) -> list[int]:
        """Bytes on a GPU of each of its tensors."""
        sizes: list[int] = self.module.placed_bytes(checkpoint.tensors, self.name)
        return sizes

    def read(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Tensor:
        """Read [experts, out, in], dequantized."""
        weight: Tensor = self.module.dequantized(checkpoint, self.name, dtype)
        return weight

    def tall(self, checkpoint: Checkpoint) -> Any:
        """Read all experts as one matrix [experts * out, in], `Packed` of its format, on the CPU."""
        return self.module.from_checkpoint(checkpoint, self.name)


@dataclass(frozen=True)
class JoinedStack:
    """A dense stack [experts, out, in] in one tensor, followed by one more expert in one or two matrices.

    name, parts   the stack, and the matrices, in the checkpoint; their rows follow each other
    """

    name: str
    parts: tuple[str, ...]
    format: str | None = None
    shared: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Its tensors' names."""
        return self.name, *self.parts

    def shape(self, checkpoint: Checkpoint) -> tuple[int, ...]:
        """[experts, out, in], with the appended expert."""
        experts, *of_one = checkpoint.tensors[self.name].shape
        return experts + 1, *of_one

    def stored_bytes(self, checkpoint: Checkpoint) -> int:
        """Bytes in the checkpoint."""
        return sum(checkpoint.tensors[key].nbytes for key in self.keys)

    def read_into(self, out: Tensor, checkpoint: Checkpoint) -> None:
        """Fill `out` [experts, out, in] of any device, tensor by tensor."""
        out[:-1].copy_(checkpoint.read(self.name))
        start = 0
        for key in self.parts:
            part = checkpoint.read(key)
            out[-1, start : start + len(part)].copy_(part)
            start += len(part)


AnyStack = ExpertStack | ExpertPieces | JoinedStack


def is_packed(stack: AnyStack) -> TypeGuard[ExpertStack | ExpertPieces]:
    """Return whether the stack's matrices are all in one quantized format, in which a GPU keeps them."""
    return stack.format is not None


def load_stack(
    stack: ExpertStack | ExpertPieces, held: SharedTensors, place: Callable[[Tensor], Tensor], device: torch.device
) -> SlabStack | LinearStack:
    """Load `stack` in its format onto `device`; `held` reads its tensors, `place` copies them, shared ones once."""
    assert stack.format is not None  # `is_packed`
    if isinstance(stack, ExpertPieces) and stack.format in LINEARS:
        return LinearStack(stack.linears(held, place, device))
    linear, checkpoint = FORMATS[stack.format].Linear, held.checkpoint
    return SlabStack(linear(stack.tall(checkpoint).placed(place, device)), stack.shape(checkpoint)[0])


def idle_bytes(model: Decoder) -> int:
    """Return the bytes of the experts that one token does not use."""
    idle = 0
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        held = sum(tensor.nbytes for tensor in (*experts.parameters(), *experts.buffers()))
        shared = experts.stacked - experts.count  # every token goes through it
        idle += held - held * (model.config.experts_active + shared) // experts.stacked
    return idle


def find(checkpoint: Checkpoint, rename: Callable[[str], str | None]) -> dict[str, ExpertStack]:
    """Parameter name -> its stack. `rename`: as in `weights.assign`."""
    found = {}
    for key in checkpoint.tensors:
        for format, module in STACKS.items():
            name = key.removesuffix(module.suffixes[0])
            if name == key or not module.is_quantized(checkpoint.tensors, name):
                continue
            keys = tuple(name + suffix for suffix in module.suffixes if name + suffix in checkpoint.tensors)
            if (target := rename(name)) is not None:
                found[target] = ExpertStack(format, module, name, keys)
    return found


def check(
    stacks: Mapping[str, AnyStack], checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]], model: str
) -> None:
    """Raise LocalqError (exit 8) for a stack whose shape is not that of its parameter (`wanted`)."""
    for target, stack in stacks.items():
        found = stack.shape(checkpoint)
        if found != wanted[target]:
            why = f"the expert tensor {stack.name!r} has shape {list(found)}, not {list(wanted[target])}"
            raise bad_file(model, why, "Download the model again.")
