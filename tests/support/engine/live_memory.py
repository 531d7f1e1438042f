"""Which memory operations of torch hold, and when: on meta tensors, so that models of any size can be asked."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """While it is entered: `now` and `peak` bytes of the storages that operations made, `events` in their order.

    An event is (name of the storage, bytes), with bytes below 0 where it goes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.events: list[tuple[int, int]] = []
        self._live: dict[int, tuple[int, int, int]] = {}  # address -> name, bytes, tensors that share it
        self._made = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        results = operation(*args, **kwargs)
        for each in tree_leaves(results):
            if isinstance(each, Tensor) and (_address(each) in self._live or _address(each) not in given):
                self._count(each)
        return results

    def _count(self, tensor: Tensor) -> None:
        address, size = _address(tensor), tensor.untyped_storage().nbytes()
        if address not in self._live:
            self._made += 1
            self._live[address] = (self._made, size, 0)
            self.events.append((self._made, size))
            self.now += size
            self.peak = max(self.peak, self.now)
        name, size, count = self._live[address]
        self._live[address] = (name, size, count + 1)
        weakref.finalize(tensor, self._drop, address)

    def _drop(self, address: int) -> None:
        name, size, count = self._live[address]
        self._live[address] = (name, size, count - 1)
        if count == 1:
            del self._live[address]
            self.events.append((name, -size))
            self.now -= size


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass
class Block:
    """One block of memory, cut up as torch's allocator does it: the smallest hole that fits, joined when freed.

    missed: bytes that did not fit. Of small tensors, which have blocks of their own, nothing is kept here.
    """

    size: int
    missed: int = 0
    _holes: list[tuple[int, int]] = field(default_factory=list)  # first, bytes
    _taken: dict[int, tuple[int, int]] = field(default_factory=dict)

    SMALL, STEP = 2**20, 512

    def __post_init__(self) -> None:
        self._holes = [(0, self.size)]

    def play(self, events: list[tuple[int, int]]) -> None:
        """Take and give back."""
        for name, size in events:
            if size > self.SMALL:
                self._take(name, -(-size // self.STEP) * self.STEP)
            elif name in self._taken and size < 0:
                self._give_back(name)

    def _take(self, name: int, size: int) -> None:
        fits = [(length, first) for first, length in self._holes if length >= size]
        if not fits:
            self.missed += size
            return
        length, first = min(fits)
        self._holes.remove((first, length))
        used = size if length - size > self.SMALL else length
        if used < length:
            self._holes.append((first + used, length - used))
        self._taken[name] = (first, used)

    def _give_back(self, name: int) -> None:
        first, length = self._taken.pop(name)
        for hole in list(self._holes):
            if hole[0] in (first + length, first - hole[1]):
                self._holes.remove(hole)
                first, length = min(first, hole[0]), length + hole[1]
        self._holes.append((first, length))
