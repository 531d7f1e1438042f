"""A part of a decode step: what the list of `fused.FusedStep` is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """A part of the step: what it does in the model, how to enqueue it, and what it must move.

    bytes   live length (cache slots that attention sees) -> bytes
    """

    operation: str
    run: Callable[[], object]
    bytes: Callable[[int], int]
