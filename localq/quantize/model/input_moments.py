"""Input moments: the mean squares of every Linear's inputs on a text, for formats that are made tensor by tensor.

Measured once per conversion, and kept beside its output until it is finished, for a resumed conversion.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from localq.errors import bad_file
from localq.files.model_folder import ModelFiles
from localq.formats.checkpoint import Checkpoint
from localq.formats.tensor_files import read_tensors
from localq.models import architecture
from localq.quantize.model.calibration_stream import Streams, stream_dtype
from localq.quantize.model.matrix_groups import groups_of
from localq.quantize.model.sensitivity import group_linears, inputs_of
from localq.quantize.model.source import SourceModel
from localq.quantize.output.shards import write_file
from localq.wording import OnProgress


def measure(model: SourceModel, streams: Streams, on_layer: Callable[[], None]) -> dict[str, Tensor]:
    """Measure every Linear of the blocks: prefix in the checkpoint -> mean squares f32 [in], on the CPU.

    model: not rotated. streams: the text as the input of the first layer; `full` is overwritten.
    """
    found: dict[str, Tensor] = {}
    for index in range(model.layers):
        block = model.block(index)
        groups = groups_of(block)
        readers = [group_linears(block, group)[0] for group in groups]
        sums = [torch.zeros(each.in_features, dtype=torch.float64, device=streams.device) for each in readers]
        tokens = 0
        with inputs_of(readers) as read:
            for number, x in enumerate(streams.full):
                out = block(x.to(streams.device, torch.float32).clone(), streams.step)
                streams.full[number].copy_(out)
                tokens += len(out)
                for total, linear in zip(sums, readers, strict=True):
                    total += read[linear].double().square().sum(0)
        for group, total in zip(groups, sums, strict=True):
            mean = (total / tokens).float().cpu()
            if not bool(torch.isfinite(mean).all()):
                why = "the model produces non-finite values on the calibration text"
                raise bad_file(f"layer {index}, {group.names[0]}", why, "Check the weights with `localq verify`.")
            found |= {model.root(index) + name: mean for name in group.names}
        on_layer()
    return found


FILE = "conversion.moments.safetensors"
MEASURING = "measuring inputs"


@dataclass(frozen=True)
class CalibrationText:
    """Calibration text: token ids in windows of one length, and the device that the model runs on."""

    windows: Sequence[Sequence[int]]
    device: torch.device

    @property
    def facts(self) -> list[str]:
        """Strings that identify the text in a conversion's fingerprint."""
        ids = json.dumps([list(window) for window in self.windows]).encode()
        return [hashlib.sha256(ids).hexdigest(), self.device.type]


def load_or_measure(
    out: Path, text: CalibrationText, source: ModelFiles, checkpoint: Checkpoint, on_progress: OnProgress
) -> dict[str, Tensor]:
    """Return prefix -> mean squares of the inputs f32 [in], on the device of `text`.

    Loaded from `out`, the folder of an interrupted conversion on this text, or measured now. Raises LocalqError: exit 2
    for a mixture of experts, 8 for damaged weights.
    """
    path = out / FILE
    if path.is_file():  # written atomically
        return {name: each.to(text.device) for name, each in read_tensors(path).items()}
    with torch.inference_mode():
        found = _measure(text, source, checkpoint, on_progress)
    write_file(path, save({name: each.clone() for name, each in found.items()}))
    return {name: each.to(text.device) for name, each in found.items()}


def open_streams(text: CalibrationText, source: ModelFiles, checkpoint: Checkpoint) -> tuple[SourceModel, Streams]:
    """Return the unrotated model, and the text as the input of its first layer.

    Raises LocalqError: exit 2 for a mixture of experts, or an architecture that is not supported.
    """
    family = architecture(source.config, source.name)
    model = SourceModel(source, checkpoint, family, text.device, seed=0, rotated=False)
    model.model.make_tables(len(text.windows[0]), text.device)
    dtype = stream_dtype(len(text.windows), len(text.windows[0]), model.model.config.hidden)
    rows = [model.model.scale_embedding(each).to(dtype) for each in model.embeddings(text.windows)]
    return model, Streams(model.model, rows, text.device)


def _measure(
    text: CalibrationText, source: ModelFiles, checkpoint: Checkpoint, on_progress: OnProgress
) -> dict[str, Tensor]:
    model, streams = open_streams(text, source, checkpoint)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        on_progress(MEASURING, done, model.layers)

    on_progress(MEASURING, 0, model.layers)
    return measure(model, streams, advance)
