"""What a conversion on calibration text is asked for, what tells it from others, and what its source has lost."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from localq import __version__
from localq.errors import usage_error
from localq.files.hub.shards import Shards
from localq.files.model_folder import ModelFiles
from localq.formats.checkpoint import Checkpoint, TensorInfo, open_checkpoint, open_fetched
from localq.quantize.output.folder import source_facts
from localq.quantize.prequantized_layers import ReadyLayers
from localq.quantize.settings import Effort, Tuning

FULL_BITS = 12  # sources of fewer bits a weight have lost something already


@dataclass(frozen=True)
class Request:
    """What to make.

    windows  calibration: token ids, all of one length
    format   a name of `target.target_of`; scheme: of vq2 alone
    bits     of vq2: scheme by scheme where they are worth most, so many per weight in all; None: `scheme` everywhere
    effort, correction   see `settings.Settings`
    tuning   of every layer; whole: of all together, behind that (`quantizer/whole.py`)
    seed     of the rotations
    vram_bytes  the most of a GPU that is used, None: what is free; it changes no result
    shards   where the weights of `source` come from, file by file; None: they are on the disk
    layers   made before: only the embedding and the head are made, without windows; None: all are made
    begun    what the user is told once nothing speaks against `out`
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
    whole: Tuning = field(default_factory=Tuning)
    correction: float = 0.03
    seed: int = 0
    vram_bytes: int | None = None
    force: bool = False
    shards: Shards | None = None
    layers: ReadyLayers | None = None
    begun: str = ""


def task_of(request: Request, planned: Sequence[dict[str, TensorInfo]]) -> dict[str, Any]:
    """What identifies a conversion: its input files, its text, its settings, its layout (`planned`), its code."""
    layout = [[name, part.dtype, list(part.shape)] for group in planned for name, part in group.items()]
    text = hashlib.sha256(json.dumps([list(window) for window in request.windows]).encode()).hexdigest()
    effort = [asdict(each) for each in (request.effort, request.tuning, request.whole)]
    settings = [*effort, request.correction, request.seed, request.device.type, request.bits]
    settings += [request.layers.sha256] if request.layers else []
    facts = source_facts(request.source) if request.shards is None else request.shards.facts
    described = [facts, layout, text, settings, request.source.config]
    return {
        "source": request.source.name,
        "format": request.format,
        "localq": __version__,
        "fingerprint": hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest(),
    }


def opened(request: Request) -> Checkpoint:
    """The weights of the source, on the disk or as they come."""
    shards = request.shards
    if shards is None:
        return open_checkpoint(request.source)
    return open_fetched(request.source, shards.headers(), shards.path)


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` for config.json, and for its part about the decoder where it has one."""
    text = config.get("text_config")
    return {**changes, **({"text_config": {**text, **changes}} if isinstance(text, dict) else {})}


def origin(source: ModelFiles, checkpoint: Checkpoint, format: str) -> str:
    """What the user must know about the weights that are quantized, "" if nothing; `format` is theirs.

    Raises LocalqError (exit 2) for formats with so few bits that nothing is left to lose.
    """
    if format not in ("", "nf4"):
        why = f"its weights are quantized already ({format})"
        raise usage_error(source.name, why, "Quantize the full-precision weights instead.")
    bits = 4.0 if format else float(FULL_BITS)
    if source.kind == "gguf":
        bits = 8 * source.path.stat().st_size / sum(math.prod(each.shape) for each in checkpoint.tensors.values())
    if bits >= FULL_BITS:
        return ""
    made = f"made from {bits:.0f}-bit weights ({format or source.kind})"
    return f"{source.name}: {made}, with what those have lost; full-precision ones give better."
