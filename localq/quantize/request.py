"""Requests for a conversion: by tensor, and layer by layer on calibration text."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from localq.errors import usage_error
from localq.files import own_head
from localq.files.hub.shards import Shards
from localq.files.model_folder import ModelFiles
from localq.files.publish.record import ConversionRecord
from localq.formats import fp8_source
from localq.formats.checkpoint import Checkpoint, TensorInfo
from localq.formats.open_checkpoint import open_checkpoint, open_fetched
from localq.quantize.bits.binary_mixture import BitBudget
from localq.quantize.model.input_moments import CalibrationText
from localq.quantize.output.folder import conversion_task, source_facts
from localq.quantize.output.shards import SHARD_BYTES
from localq.quantize.prequantized_layers import PrequantizedLayers
from localq.quantize.settings import Effort, Tuning

FULL_BITS = 12  # a source with fewer bits per weight is quantized already


@dataclass(frozen=True)
class TensorwiseRequest:
    """A conversion tensor by tensor.

    scheme  of bcq: "q3g128" and the like; "" = the default
    text    calibration: squeezellm weights columns by their inputs on it, bcq quantizes layer by layer on it
            (`binary/layers.py`); None: all columns count alike, each matrix by itself
    budget  of bcq, in place of scheme and text: bits per weight, spent where they matter most
    force   replace an earlier model in `out`
    record  what is kept of the source and the command
    """

    source: ModelFiles
    format: str
    out: Path
    scheme: str = ""
    text: CalibrationText | None = None
    budget: BitBudget | None = None
    force: bool = False
    shard_bytes: int = SHARD_BYTES
    record: ConversionRecord | None = field(default=None, compare=False)


@dataclass(frozen=True)
class LayerwiseRequest:
    """A conversion layer by layer.

    windows  calibration: token ids, all of one length
    format   a name that `target_format` knows; scheme: of vq2 only
    bits     of vq2: mix schemes to this many bits per weight; None: `scheme` everywhere
    effort, correction   see `ConversionSettings`
    tuning   fine-tuning of every layer; joint_tuning: of all layers together, after that
    seed     of the rotations
    vram_bytes  the most of a GPU to use, None: what is free; the result is the same
    force    replace an earlier model in `out`
    shards   the weights of `source`, downloaded file by file; None: they are on disk
    layers   already quantized: only embedding and head are converted, without windows; None: all are
    start_note  a line for the user, once `out` is accepted
    record   what is kept of the source and the command
    """

    source: ModelFiles
    out: Path
    windows: Sequence[Sequence[int]]
    device: torch.device
    format: str = "vq2"
    scheme: str = "s4l16"
    bits: float | None = None
    effort: Effort = field(default_factory=Effort)
    tuning: Tuning = field(default_factory=Tuning)
    joint_tuning: Tuning = field(default_factory=Tuning)
    correction: float = 0.03
    seed: int = 0
    vram_bytes: int | None = None
    force: bool = False
    shards: Shards | None = None
    layers: PrequantizedLayers | None = None
    start_note: str = ""
    record: ConversionRecord | None = field(default=None, compare=False)


def layerwise_task(request: LayerwiseRequest, layout: Sequence[dict[str, TensorInfo]]) -> dict[str, Any]:
    """Return what identifies a layer-by-layer conversion: its source, text and settings, and its output `layout`."""
    text = hashlib.sha256(json.dumps([list(window) for window in request.windows]).encode()).hexdigest()
    # The first name of a field stays in the fingerprint, so that conversions begun by earlier builds are resumed.
    effort = [
        {"books" if name == "codebooks" else name: value for name, value in asdict(each).items()}
        for each in (request.effort, request.tuning, request.joint_tuning)
    ]
    settings = [*effort, request.correction, request.seed, request.device.type, request.bits]
    settings += [request.layers.sha256] if request.layers else []
    facts = source_facts(request.source) if request.shards is None else request.shards.facts
    return conversion_task(request.source, request.format, layout, [text, settings, request.source.config], facts)


def open_source(request: LayerwiseRequest) -> Checkpoint:
    """Open the weights of the source, on disk or as they are downloaded."""
    shards = request.shards
    if shards is None:
        return open_checkpoint(request.source)
    headers = shards.headers()
    config = own_head.untied(request.source.config, headers.values(), compare=False)
    return open_fetched(replace(request.source, config=config), headers, shards.path)


def config_changes(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `changes` for config.json, and for its `text_config` where it has one."""
    text = config.get("text_config")
    return {**changes, **({"text_config": {**text, **changes}} if isinstance(text, dict) else {})}


def source_note(source: ModelFiles, checkpoint: Checkpoint, format: str) -> str:
    """Return a note for the user on a source in `format`, "" for full-precision weights.

    Raises LocalqError (exit 2) for a source that has too few bits to quantize again.
    """
    if format not in ("", "nf4"):
        why = f"the weights are already quantized ({format})"
        raise usage_error(source.name, why, "Quantize the full-precision weights instead.")
    bits = 4.0 if format else float(FULL_BITS)
    if source.quantization.get("quant_method") == fp8_source.METHOD:
        format, bits = fp8_source.METHOD, 8.0
    if source.kind == "gguf":
        held = sum(path.stat().st_size for path in source.weight_paths)
        bits = 8 * held / sum(math.prod(each.shape) for each in checkpoint.tensors.values())
    if bits >= FULL_BITS:
        return ""
    return (
        f"{source.name}: the source weights are already quantized ({bits:.0f}-bit {format or source.kind}), so "
        "quantization errors accumulate; full-precision weights give a better model."
    )
