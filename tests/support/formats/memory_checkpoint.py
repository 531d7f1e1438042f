"""A checkpoint in memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from localq.formats.checkpoint import Checkpoint, info


class Held:
    """`checkpoint()` reads from the tensors given, as they are."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.held = tensors

    def read(self, name: str) -> Tensor:
        return self.held[name]

    def close(self) -> None:
        pass

    def checkpoint(
        self, quantization: dict[str, Any] | None = None, config: dict[str, Any] | None = None
    ) -> Checkpoint:
        """quantization, config: what config.json says of both."""
        described = {name: info(each.dtype, tuple(each.shape)) for name, each in self.held.items()}
        return Checkpoint(described, self, quantization, config)
