"""Joint training of a conversion (`--best`): layers that were quantized one by one are trained together, and written.

Until then they are drafts: shards beside the model, under their own names.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from localq.errors import usage_error
from localq.formats.checkpoint import in_memory
from localq.formats.codebooks.vq2 import Packed
from localq.formats.tensor_files import read_tensors
from localq.models.decoder import Block
from localq.models.layers import RMSNorm
from localq.quantize.codebooks import joint_training
from localq.quantize.codebooks.joint_training import OnStep
from localq.quantize.model.calibration_stream import Streams
from localq.quantize.model.matrix_groups import groups_of
from localq.quantize.model.sensitivity import Ending, make_ending
from localq.quantize.model.source import SourceModel
from localq.quantize.output.resume_files import ResumeFiles
from localq.quantize.output.shards import Shard
from localq.quantize.settings import ConversionSettings, QuantizedLayer, Tuning
from localq.quantize.target import TargetFormat

DRAFT = "conversion.layer-{:05d}.safetensors"
# Most weights of the decoder's layers. The host holds codes and streams of all layers: 36 GB for 70B, by count.
LARGEST = 10**10

Windows = Sequence[Sequence[int]]


def is_trained_jointly(tuning: Tuning, model: SourceModel) -> bool:
    """True where the layers of `model` are trained together."""
    return tuning.steps > 0 and model.weights() <= LARGEST


def why_not(tuning: Tuning, model: SourceModel, name: str, *, ready: bool) -> str:
    """Return a note for the user on why the layers are not trained together, "" where they are.

    Raises LocalqError (exit 2) where that leaves nothing to do, because the layers of `name` are `ready`.
    """
    if tuning.steps == 0 or is_trained_jointly(tuning, model):
        return ""
    why = (
        f"joint training is limited to models with up to {LARGEST // 10**9} billion weights "
        "(it needs 0.5 GB of RAM per billion weights)"
    )
    if ready:
        raise usage_error("--best", f"{name}: {why}", "Remove --best.")
    return f"{name}: {why}, so layers are only fine-tuned individually."


def draft_shards(shards: Sequence[Shard]) -> list[Shard]:
    """Return a draft shard for each of these layers."""
    return [Shard(DRAFT.format(number), shard.tensors) for number, shard in enumerate(shards, 1)]


@dataclass(frozen=True)
class LayerFiles:
    """The layers of a conversion on disk; files: of embedding, layers, and an untied head; config: the source's."""

    model: SourceModel
    target: TargetFormat
    folder: Path
    files: list[Shard]
    config: dict[str, Any]

    def layer(self, index: int, *, trained: bool) -> tuple[dict[str, Packed], dict[str, Tensor]]:
        """Read a layer's matrices, and with `trained` its other parameters, by name."""
        stored = in_memory(read_tensors(self.folder / self.files[1 + index].name), self.config)
        model = self.model
        packed = {name: self.target.from_checkpoint(stored, model.prefix(index, name)) for name in model.linears(index)}
        others = model.other_names(index).items() if trained else ()
        return packed, {name: stored.read(key) for name, key in others}

    def shell(self, index: int, others: dict[str, Tensor], device: torch.device) -> Block:
        """Return the layer in f32 on the device, with its matrices on the meta device."""
        block = copy.deepcopy(self.model.meta_block(index)).float()
        for name, value in others.items():
            owner, _, last = name.rpartition(".")
            parameter = nn.Parameter(value.to(device, torch.float32), requires_grad=False)
            setattr(block.get_submodule(owner), last, parameter)
        for module in block.modules():
            if isinstance(module, RMSNorm):
                module.finish()
        return block

    def end(self, name: str) -> Tensor:
        """Read a tensor of the embedding, the last norm or the head."""
        (shard,) = {each.name for each in self.files if name in each.tensors}
        return read_tensors(self.folder / shard, (name,))[name]

    def ending(self, device: torch.device) -> Ending:
        """Return last norm and head, which predict from the stream after the last layer."""
        table, norm, *head = self.model.end_shapes()
        return make_ending(self.model.model, self.end(norm), self.end(head[0] if head else table), device)


@dataclass(frozen=True)
class TrainedLayers:
    """The trained layers, each with a block of its fixed parameters, and a summary for the user."""

    layers: list[tuple[QuantizedLayer, Block]]
    summary: str


def train(
    written: LayerFiles,
    streams: Streams,
    windows: Windows,
    settings: ConversionSettings,
    resume: ResumeFiles,
    on_step: OnStep,
    name: str,
) -> TrainedLayers:
    """Train the layers in `written`; streams: after the last of them; name: the model's, for errors."""
    device, model = streams.device, written.model
    table = written.end(next(iter(model.end_shapes())))

    def first(number: int) -> Tensor:
        return model.model.scale_embedding(table[torch.tensor(windows[number])].to(device).float())

    def aim(number: int) -> Tensor:
        return streams.full[number].to(device).float()

    layers = []
    for index in range(model.layers):
        packed, others = written.layer(index, trained=True)
        layers.append((written.shell(index, others, device), packed))
    texts = joint_training.Sequences(len(windows), first, aim, streams.step, name, settings.dtype)
    outcome = joint_training.train(
        layers, texts, written.ending(device), settings.joint_tuning, settings.seed, resume, on_step
    )
    made = []
    for (block, _), (packed, others) in zip(layers, outcome.layers, strict=True):
        homes = {name: home for group in groups_of(block) for name, home in group.homes(settings.shares).items()}
        made.append(
            (QuantizedLayer(packed, homes, {name: value.to(settings.dtype) for name, value in others.items()}), block)
        )
    return TrainedLayers(made, str(outcome))
