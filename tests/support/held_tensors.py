"""A checkpoint in memory."""

from __future__ import annotations

from torch import Tensor

from localq.checkpoint import Checkpoint, info


class Held:
    """`checkpoint()` reads from the tensors given, as they are."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.held = tensors

    def read(self, name: str) -> Tensor:
        return self.held[name]

    def close(self) -> None:
        pass

    def checkpoint(self) -> Checkpoint:
        return Checkpoint({name: info(each.dtype, tuple(each.shape)) for name, each in self.held.items()}, self)
