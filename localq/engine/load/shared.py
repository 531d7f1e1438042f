"""Tensors that several Linears of a checkpoint share, such as codebooks: read once, and at one place on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from localq.formats.checkpoint import Checkpoint


class Shared:
    """For the time of loading. `checkpoint` is the one given, but gives the same object whenever it is asked for one of
    `names`; `once` knows these again by that.
    """

    def __init__(self, checkpoint: Checkpoint, names: Iterable[str]) -> None:
        self._source, self._names = checkpoint, frozenset(names)
        self._read: dict[str, Tensor] = {}  # keeps them alive, so that an id is of one tensor only
        self._ids: set[int] = set()
        self._placed: dict[int, Tensor] = {}
        self.checkpoint = Checkpoint(checkpoint.tensors, self, checkpoint.quantization, checkpoint.config)

    def read(self, name: str) -> Tensor:
        """See `checkpoint.Source`."""
        if name not in self._names:
            return self._source.read(name)
        if name not in self._read:
            self._read[name] = self._source.read(name)
            self._ids.add(id(self._read[name]))
        return self._read[name]

    def close(self) -> None:
        """See `checkpoint.Source`."""
        self._source.close()

    def once(self, place: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """`place`, but a shared tensor gets the place that it got first."""

        def placed(tensor: Tensor) -> Tensor:
            if id(tensor) not in self._ids:
                return place(tensor)
            if id(tensor) not in self._placed:
                self._placed[id(tensor)] = place(tensor)
            return self._placed[id(tensor)]

        return placed
