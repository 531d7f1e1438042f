"""Growth of memory with the context. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from localq.files.architecture import Architecture
from localq.planner import footprint
from localq.planner.placement import Placement


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of bytes with the context.

    per_token   per token
    limited     (slots, bytes per token of the first `slots`), such as those of windows that slide
    """

    per_token: int
    limited: tuple[tuple[int, int], ...] = ()

    def bytes(self, context: int) -> int:
        """Bytes of a context of so many tokens."""
        return context * self.per_token + sum(min(context, slots) * size for slots, size in self.limited)

    def context(self, free_bytes: int) -> int:
        """The largest context that fits in `free_bytes`; 0 if none does. Something grows without a limit."""
        full, growing = 0, self.per_token + sum(size for _, size in self.limited)
        for slots, size in sorted(self.limited):
            if (free_bytes - full) // growing < slots:
                break
            full, growing = full + slots * size, growing - size
        return max((free_bytes - full) // growing, 0)

    def up_to(self, longest: int) -> Growth:
        """The same, of a context of at most `longest` tokens."""
        ends = ((longest, self.per_token), *((min(slots, longest), size) for slots, size in self.limited))
        return Growth(0, tuple(pair for pair in ends if pair[1]))


@functools.lru_cache(maxsize=256)
def growths(arch: Architecture, placement: Placement, itemsize: int, chunk: int | None) -> dict[str, Growth]:
    """Component -> how it grows; chunk as of `footprint.window_chunk`."""
    growing = footprint.per_token_bytes(arch, placement, itemsize, chunk)
    windowed = footprint.windowed_bytes(arch, placement, itemsize, chunk)
    slots = 0 if chunk is None else arch.window + chunk
    limited = {part: ((slots, size),) for part, size in windowed.items() if size}
    return {part: Growth(growing.get(part, 0), limited.get(part, ())) for part in growing}


def total(growths: Iterable[Growth]) -> Growth:
    """The growth of all together."""
    known, limited = [*growths], dict[int, int]()
    for slots, size in (pair for each in known for pair in each.limited):
        limited[slots] = limited.get(slots, 0) + size
    return Growth(sum(each.per_token for each in known), tuple(sorted(limited.items())))
