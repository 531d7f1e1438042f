"""What a text tells about the inputs of every Linear, for formats that are then made tensor by tensor.

Measured once for a conversion (`quantizer/importance.py`) and kept beside what is written until that is done, so that a
conversion that goes on has it at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from localq.checkpoint import Checkpoint
from localq.errors import LocalqError
from localq.modelfiles import ModelFiles
from localq.models import ARCHITECTURES
from localq.quantizer.importance import importances
from localq.quantizer.source import Source
from localq.quantizer.stream import Streams, kept_dtype
from localq.shard_writer import write_file

FILE = "conversion.moments.safetensors"
MEASURING = "measuring inputs"
OnProgress = Callable[[str, int, int], None]  # what is done, layers done, layers in total


@dataclass(frozen=True)
class Text:
    """Token ids in windows of one length, and where the model runs on them."""

    windows: Sequence[Sequence[int]]
    device: torch.device

    @property
    def facts(self) -> list[str]:
        """What tells it from another."""
        ids = json.dumps([list(window) for window in self.windows]).encode()
        return [hashlib.sha256(ids).hexdigest(), self.device.type]


def kept(out: Path, text: Text, source: ModelFiles, checkpoint: Checkpoint, tell: OnProgress) -> dict[str, Tensor]:
    """Of every Linear, by its prefix, the mean squares of its inputs f32 [in], on the device of `text`.

    Those that lie in `out`, which belongs to a conversion on this text, or measured now. Raises LocalqError: exit 2 for
    a mixture of experts, 8 for damaged weights.
    """
    path = out / FILE
    if path.is_file():  # placed whole
        return load_file(path, device=str(text.device))
    with torch.inference_mode():
        found = _measured(text, source, checkpoint, tell)
    write_file(path, save({name: each.clone() for name, each in found.items()}))
    return {name: each.to(text.device) for name, each in found.items()}


def begun(text: Text, source: ModelFiles, checkpoint: Checkpoint) -> tuple[Source, Streams]:
    """The model as it is, and the text as its first layer reads it.

    Raises LocalqError: exit 2 for a mixture of experts, or an architecture that is not supported.
    """
    model_type = source.config.get("model_type")
    if model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise LocalqError(source.name, f"the architecture {model_type!r} is not supported", f"Supported: {known}.")
    model = Source(source, checkpoint, ARCHITECTURES[model_type], text.device, seed=0, turned=False)
    model.model.make_tables(len(text.windows[0]), text.device)
    dtype = kept_dtype(len(text.windows), len(text.windows[0]), model.model.config.hidden)
    rows = [(each * model.model.embed_scale).to(dtype) for each in model.embedded(text.windows)]
    return model, Streams(model.model, rows, text.device)


def _measured(text: Text, source: ModelFiles, checkpoint: Checkpoint, tell: OnProgress) -> dict[str, Tensor]:
    model, streams = begun(text, source, checkpoint)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        tell(MEASURING, done, model.layers)

    tell(MEASURING, 0, model.layers)
    return importances(model, streams, advance)
