"""A model as a GPU holds it, on the CPU: its Linears packed, its tensors in one arena."""

from __future__ import annotations

from typing import Any

import torch

from localq.engine.load import shared_experts, weights
from localq.engine.load.placing import Destinations
from localq.files.model_folder import ModelFiles
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import architecture
from localq.planner.placement import STORED, Placement


def packed_model(files: ModelFiles, head: str = "") -> tuple[Any, list[int], Destinations]:
    """The model in float32 with tables for 512 positions, the bytes of each of its tensors, and the filled arena.

    head: as of `Placement`; as stored where the files have it so.
    """
    cpu, family = torch.device("cpu"), architecture(files.config)
    with torch.device("meta"):
        model = family.Model(family.Config.from_dict(files.config))
    with open_checkpoint(files, packed=True) as checkpoint:
        assignment = weights.assign(checkpoint, model, family.rename, "tiny")
        assignment = shared_experts.append(model, assignment, checkpoint)
        sizes = weights.block_sizes(assignment, checkpoint, model, torch.float32, packed=True)
        head = head or (STORED if assignment.head is not None else "16")
        places = Destinations(cpu, torch.float32, Placement(head=head), sizes)
        places.packed = True
        done: list[tuple[int, int]] = []
        weights.fill(model, assignment, checkpoint, places, lambda *progress: done.append(progress))
        assert done[-1][0] <= done[-1][1]
    model.make_tables(512, cpu)
    return model, sizes, places
