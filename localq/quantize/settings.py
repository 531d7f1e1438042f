"""Settings of a conversion layer by layer, and its result for one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localq.formats.codebooks.search_kernel import Book
from localq.formats.codebooks.vq2 import Packed

Watch = Callable[[str], None]  # what begins, for who measures it


def unwatched(stage: str) -> None:
    """Nobody measures."""


@dataclass(frozen=True)
class Effort:
    """How hard the encoder tries.

    beam     paths of a row that the search follows
    columns  of a block; the search looks back and ahead within it
    rounds   of choosing codes and fitting codebooks
    steps    of conjugate gradients of a fit
    damping  of the metric, in parts of its mean diagonal
    """

    beam: int = 32
    columns: int = 192
    rounds: int = 1
    steps: int = 8
    damping: float = 0.01


@dataclass(frozen=True)
class Tuning:
    """How long, and how fast.

    steps      of Adam, 0 = none; each sees `sequences` of the text
    books, scales, norms  learning rates at the start; they fall to nothing along a cosine. Scales and norms are
               multiplied by what is learned, codebooks of weights near 1 learn what is added
    """

    steps: int = 0
    sequences: int = 8
    books: float = 2e-3
    scales: float = 1e-3
    norms: float = 1e-3


@dataclass(frozen=True)
class Settings:
    """What a conversion is made with.

    effort      of the encoder
    books       where the search begins, on the device: of each group of a layer
    correction  damping of the goals (`Statistics.finish`), in parts of the metric's mean diagonal
    rotate      inputs that are rotated when the model runs: "down", "all" where the stream cannot be turned, or "none"
    seed        of all rotations, and of the order of the text in fine-tuning
    shares      matrices that read one input share their codebooks
    tuning      fine-tuning of every layer
    dtype       in which norms and biases are written
    on_host     weights wait on the host while they are not needed (`memory.py`); it changes no result
    whole       training of all layers together (`whole.py`)
    watch       hears what begins: "statistics", "goals", "search", "codebooks", "passes", "fine-tuning"
    """

    effort: Effort
    books: tuple[tuple[Book, ...], ...]
    correction: float = 0.03
    rotate: str = "down"
    seed: int = 0
    shares: bool = True
    tuning: Tuning = field(default_factory=Tuning)
    dtype: torch.dtype = torch.bfloat16
    on_host: bool = False
    watch: Watch = unwatched
    whole: Tuning = field(default_factory=Tuning)


def inputs_rotated(turned: bool, possible: bool = True) -> str:
    """`Settings.rotate` of a model whose stream is `turned` or not, in a format in which it is `possible` at all."""
    return ("down" if turned else "all") if possible else "none"


@dataclass(frozen=True)
class Made:
    """What is made of a layer.

    packed  matrices by module name
    homes   of their codebooks
    others  parameters that fine-tuning changed, by name, as they are written
    """

    packed: dict[str, Packed] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)
