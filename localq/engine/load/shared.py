"""Tensors that several Linears share, such as codebooks: read once, and placed once on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from localq.formats.checkpoint import Checkpoint


class SharedTensors:
    """Shared tensors during a load: `checkpoint` returns one object for each of `names`, and `once` places it once."""

    def __init__(self, checkpoint: Checkpoint, names: Iterable[str]) -> None:
        self._source, self._names = checkpoint, frozenset(names)
        self._read: dict[str, Tensor] = {}  # keeps them alive, so that an id stays unique
        self._ids: set[int] = set()
        self._placed: dict[int, Tensor] = {}
        self.checkpoint = Checkpoint(checkpoint.tensors, self, checkpoint.quantization, checkpoint.config)

    def read(self, name: str) -> Tensor:
        """Read a tensor; a shared one only the first time."""
        if name not in self._names:
            return self._source.read(name)
        if name not in self._read:
            self._read[name] = self._source.read(name)
            self._ids.add(id(self._read[name]))
        return self._read[name]

    def close(self) -> None:
        """Close the checkpoint."""
        self._source.close()

    def once(self, place: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return `place` with results for shared tensors cached."""

        def placed(tensor: Tensor) -> Tensor:
            if id(tensor) not in self._ids:
                return place(tensor)
            if id(tensor) not in self._placed:
                self._placed[id(tensor)] = place(tensor)
            return self._placed[id(tensor)]

        return placed
