"""Settings of a layer-by-layer conversion, and its result for one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localq.formats.codebooks.search_kernel import Codebook
from localq.formats.codebooks.vq2 import Packed

OnStage = Callable[[str], None]  # the stage that begins; for measurements


def ignore_stage(stage: str) -> None:
    """Ignore the stage: the default `OnStage`."""


@dataclass(frozen=True)
class Effort:
    """Effort of the encoder.

    beam     candidate paths per row in the search
    columns  of a block; the search looks back and ahead within it
    rounds   of choosing codes and fitting codebooks
    steps    of conjugate gradients in a fit
    damping  of the metric, as a fraction of its mean diagonal
    """

    beam: int = 32
    columns: int = 192
    rounds: int = 1
    steps: int = 8
    damping: float = 0.01


@dataclass(frozen=True)
class Tuning:
    """Length and learning rates of a fine-tuning.

    steps      of Adam, 0 = no fine-tuning; each step sees `sequences` of the text
    codebooks, scales, norms  learning rates at the start of a cosine schedule that ends at 0. Scales and norms are
               multiplied by what is learned; to codebooks it is added
    """

    steps: int = 0
    sequences: int = 8
    codebooks: float = 2e-3
    scales: float = 1e-3
    norms: float = 1e-3


@dataclass(frozen=True)
class ConversionSettings:
    """Settings of a layer-by-layer conversion.

    effort        of the encoder
    codebooks     where the search starts, on the device: for each group of a layer
    correction    damping of the targets (`Statistics.finish`), as a fraction of the metric's mean diagonal
    rotate        inputs that are rotated at run time: "down", "all" where the stream cannot be rotated, or "none"
    seed          of all rotations, and of the order of the text in fine-tuning
    shares        matrices that read one input share their codebooks
    tuning        fine-tuning of every layer
    dtype         of norms and biases in the output
    on_host       weights wait on the host while they are not needed (`memory.py`); the result is the same
    on_stage      called with each stage: "statistics", "targets", "search", "codebooks", "forward", "fine-tuning"
    joint_tuning  training of all layers together (`codebooks/joint_training.py`)
    """

    effort: Effort
    codebooks: tuple[tuple[Codebook, ...], ...]
    correction: float = 0.03
    rotate: str = "down"
    seed: int = 0
    shares: bool = True
    tuning: Tuning = field(default_factory=Tuning)
    dtype: torch.dtype = torch.bfloat16
    on_host: bool = False
    on_stage: OnStage = ignore_stage
    joint_tuning: Tuning = field(default_factory=Tuning)


def rotate_mode(stream_rotated: bool, possible: bool = True) -> str:
    """Return `ConversionSettings.rotate` for a model; possible: the format can rotate inputs at run time."""
    return ("down" if stream_rotated else "all") if possible else "none"


@dataclass(frozen=True)
class QuantizedLayer:
    """A quantized layer.

    packed  matrices by module name
    homes   module name -> the module that holds its codebooks
    others  parameters that fine-tuning changed, by name, in their output dtype
    """

    packed: dict[str, Packed] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)
