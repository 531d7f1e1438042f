"""Sources of a benchmark's weights: files, or random numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from localq.bench.synthetic import checkpoint as synthetic_checkpoint
from localq.files.model_folder import ModelFiles, open_model
from localq.formats.checkpoint import Checkpoint
from localq.formats.open_checkpoint import open_checkpoint

Opened = Callable[[ModelFiles, torch.device], Checkpoint]


def from_files(path: Path) -> tuple[ModelFiles, Opened]:
    """A model on the disk."""
    return open_model(path), lambda files, device: open_checkpoint(files, packed=device.type == "cuda")


def random(name: str, seed: int) -> tuple[ModelFiles, Opened]:
    """Random weights of the catalogued model NAME or NAME@FORMAT."""
    described, format = synthetic_checkpoint.files_of(name)
    return described, lambda files, device: synthetic_checkpoint.checkpoint(files, format, device, seed)
