"""Bits per weight of a model, counted over the tensors of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from localq.engine.load import weights
from localq.engine.load.placing import HEAD, TABLE
from localq.files.model_folder import ModelFiles
from localq.formats import int8, nf4
from localq.formats.checkpoint import Checkpoint
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import architecture
from localq.planner.placement import STORED

UNQUANTIZED = 16.0
AS_STORED = partial(open_checkpoint, packed=True)


@dataclass(frozen=True)
class ModelBits:
    """The size of a model's weights.

    bits_per_weight  over all quantized linears and experts, with scales and tables; 16 without any
    weights_bytes    of all weights, unquantized ones in 16 bit
    """

    bits_per_weight: float
    weights_bytes: int


def per_weight(files: ModelFiles, head: str = "16") -> float:
    """Return `ModelBits.bits_per_weight`."""
    return size_of(files, head).bits_per_weight


def dense_bytes(files: ModelFiles) -> int:
    """Return the bytes of all weights of the model in 16 bit."""
    family = architecture(files.config)
    with torch.device("meta"):
        model = family.Model(family.Config.from_dict(files.config))
    return sum(2 * each.numel() for each in model.parameters())


def size_of(files: ModelFiles, head: str = "16", opened: Callable[[ModelFiles], Checkpoint] = AS_STORED) -> ModelBits:
    """Count the weights of a model as its files store them, which is how a GPU holds them.

    head    "8" or "nf4" where the head is quantized at load time, as in `placement.Placement`
    opened  returns the weights of `files`, or random ones
    """
    family = architecture(files.config)
    with torch.device("meta"):
        model = family.Model(family.Config.from_dict(files.config))
    shapes = dict(model.named_parameters())
    dense = {name: each.numel() for name, each in shapes.items()}
    count = stored = 0
    shared: dict[str, int] = {}
    with opened(files) as checkpoint:
        assignment = weights.assign(checkpoint, model, family.rename, files.name)
        linears = assignment.quantized
        for target, stack in assignment.stacks.items():
            count += dense.pop(target)
            stored += stack.stored_bytes(checkpoint)
            shared |= {key: checkpoint.tensors[key].nbytes for key in stack.shared}
        for path, entry in linears.items():
            count += dense.pop(f"{path}.weight")
            stored += entry.module.stored_bytes(checkpoint.tensors, entry.prefix)
            shared |= {key: checkpoint.tensors[key].nbytes for key in entry.shared}
    stored += sum(shared.values())
    if head not in ("16", STORED) and HEAD not in linears:
        out, columns = shapes[TABLE].shape
        count += out * columns
        stored += (nf4 if head == "nf4" else int8).bytes(out, columns)
        dense.pop(f"{HEAD}.weight", None)
    bits = 8 * stored / count if count else UNQUANTIZED
    return ModelBits(bits, stored + 2 * sum(dense.values()))
