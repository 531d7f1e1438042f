"""The matrices of experts in a source: where each is read, and its name in the output.

Files hold them one by one (`engine/load/expert_pieces.py`), or, as transformers 5 writes them, as stacks in 16 bit;
either way they are written one by one, under the published names of the family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localq.engine.load.expert_pieces import PARTS, ExpertPieces
from localq.engine.load.weights import Assignment
from localq.formats.checkpoint import Checkpoint
from localq.quantize.output.tensor_jobs import experts_of


@dataclass(frozen=True)
class ExpertMatrix:
    """An expert's matrix in the source.

    keys    checkpoint tensors that `read` reads
    prefix  of the output tensors
    read    -> [out, in] as stored, or f32 where it is quantized
    """

    keys: tuple[str, ...]
    prefix: str
    read: Callable[[], Tensor]


def expert_matrices(assignment: Assignment, checkpoint: Checkpoint, model_type: str) -> dict[str, ExpertMatrix]:
    """Return path in the model ("layers.0.mlp.experts.7.gate_proj") -> matrix."""
    found: dict[str, ExpertMatrix] = {}
    for target, stack in assignment.stacks.items():
        if isinstance(stack, ExpertPieces):
            home = target.rpartition(".")[0]
            for (expert, part), piece in stack.pieces.items():
                read = _of_piece(stack, expert, part, checkpoint)
                keys = (*piece.keys, *stack.shared)
                found[f"{home}.{expert}.{part}"] = ExpertMatrix(keys, piece.prefix, read)
    for target, key in assignment.dense.items():
        home, _, leaf = target.rpartition(".")
        if home.endswith(".experts") and leaf in PARTS:
            prefixes = experts_of(key, checkpoint.tensors[key].shape, model_type)
            for expert, names in enumerate(prefixes):
                for number, (part, prefix) in enumerate(zip(PARTS[leaf], names, strict=True)):
                    read = _of_stack(checkpoint, key, expert, number, len(names))
                    found[f"{home}.{expert}.{part}"] = ExpertMatrix((key,), prefix, read)
    return found


def _of_piece(stack: ExpertPieces, expert: int, part: str, checkpoint: Checkpoint) -> Callable[[], Tensor]:
    return lambda: stack.pieces[expert, part].read(checkpoint, torch.float32)


def _of_stack(checkpoint: Checkpoint, key: str, expert: int, number: int, parts: int) -> Callable[[], Tensor]:
    return lambda: checkpoint.read(key)[expert].chunk(parts)[number]
