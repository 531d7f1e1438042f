"""The used parts of a cache as blocks of bytes, copied to and from the host. Knows neither ids nor files."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 2**24  # part of the format of `snapshot`
WORKERS = 4  # blocks in flight, which is the host memory used


@dataclass(frozen=True)
class _BlockPiece:
    """A piece of a cache, u8 [bytes], contiguous on the device, and its offset in a block."""

    stored: Tensor
    at: int


class CacheBlocks:
    """Parts of a cache (`KVCache.parts`), which are not all empty: joined, and cut every BLOCK bytes."""

    def __init__(self, parts: list[Tensor]) -> None:
        runs = [run for part in parts if part.numel() for run in ([part] if part.is_contiguous() else part)]
        self._runs = [run.flatten().view(torch.uint8) for run in runs]  # views: slots of a head lie together
        self._starts = [0, *itertools.accumulate(len(run) for run in self._runs)]
        self._on_cuda = parts[0].is_cuda

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return self._starts[-1]

    @property
    def count(self) -> int:
        """The number of blocks."""
        return block_count(self.bytes)

    def size(self, block: int) -> int:
        """Return the bytes of a block."""
        return min(BLOCK, self.bytes - block * BLOCK)

    def read(self, block: int, buffer: Tensor) -> memoryview:
        """Read a block into `buffer`, u8 [BLOCK]; returns its bytes."""
        for run in self._of(block):
            buffer[run.at : run.at + len(run.stored)].copy_(run.stored, non_blocking=True)
        self._finish()
        content: memoryview = buffer.numpy().data[: self.size(block)]
        return content

    def write(self, block: int, buffer: Tensor) -> None:
        """Write `buffer` into the cache; the buffer may be reused at once."""
        with torch.inference_mode():  # a mode of the thread
            for run in self._of(block):
                run.stored.copy_(buffer[run.at : run.at + len(run.stored)], non_blocking=True)
        self._finish()

    def each_block(self, work: Callable[[int, Tensor], None]) -> None:
        """Run `work` for every block, some in parallel, each with its own buffer; stops at the first error."""
        count = min(WORKERS, self.count)
        buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for buffer in self._buffers(count):
            buffers.put(buffer)

        def with_buffer(block: int) -> None:
            buffer = buffers.get()
            try:
                work(block, buffer)
            finally:
                buffers.put(buffer)

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(with_buffer, range(self.count)))

    def _buffers(self, count: int) -> Tensor:
        """Allocate u8 [count, BLOCK], pinned for large copies from a GPU; torch caches pinned memory by size.

        Some systems pin little (WSL2, containers); pageable memory is slower with the same result.
        """
        if self._on_cuda and count == WORKERS:
            with contextlib.suppress(RuntimeError):
                return torch.empty(count, BLOCK, dtype=torch.uint8, pin_memory=True)
        return torch.empty(count, BLOCK, dtype=torch.uint8)

    def _of(self, block: int) -> Iterator[_BlockPiece]:
        first, end = block * BLOCK, block * BLOCK + self.size(block)
        for index in range(bisect.bisect_right(self._starts, first) - 1, len(self._runs)):
            start = self._starts[index]
            if start >= end:
                return
            skipped = max(0, first - start)
            yield _BlockPiece(self._runs[index][skipped : end - start], start + skipped - first)

    def _finish(self) -> None:
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()


def block_count(size: int) -> int:
    """Return the number of blocks of `size` bytes."""
    return -(-size // BLOCK)
