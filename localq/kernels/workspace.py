"""Scratch memory of launches: one workspace per stream, allocated once and kept for the life of the process.

Blocks of a launch that share a result meet there. Launches of one stream follow each other, so that they may share it;
those of two streams may not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

WORDS = 2**21  # of 4 bytes: enough for one row of any matrix, for eight of most
_replays_on: ContextVar[int | None] = ContextVar("stream on which the capture will be replayed", default=None)


@dataclass(frozen=True)
class Workspace:
    """words i32, all bits set: launches leave them so (csrc/common/exchange.cuh). None where there is no GPU."""

    words: Tensor | None

    @property
    def arguments(self) -> tuple[int, int]:
        """Address and words, as the bindings take them."""
        return (0, 0) if self.words is None else (self.words.data_ptr(), self.words.numel())

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return 0 if self.words is None else self.words.nbytes


def workspace_of(device: torch.device) -> Workspace:
    """The workspace of torch's current stream on `device`; the first call for a stream allocates it.

    What is captured takes that of the stream it will be replayed on: the default one, or that of `captured_for`.
    Raises RuntimeError if it would be allocated during a capture: its memory would belong to the graph, and its first
    contents would be written by replays alone.
    """
    if device.type != "cuda":
        return Workspace(None)
    stream = _replays_on.get()
    if stream is None:
        captures = torch.cuda.is_current_stream_capturing()
        found = torch.cuda.default_stream(device) if captures else torch.cuda.current_stream(device)
        stream = found.cuda_stream
    return _allocate(device, stream)


@contextlib.contextmanager
def captured_for(stream: torch.cuda.Stream) -> Iterator[None]:
    """Launches inside are captured, or run before a capture, for `stream`: they take its workspace."""
    token = _replays_on.set(stream.cuda_stream)
    try:
        yield
    finally:
        _replays_on.reset(token)


@functools.cache
def _allocate(device: torch.device, stream: int) -> Workspace:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the workspace of a stream cannot be allocated during a capture: run the launch once before")
    return Workspace(torch.full((WORDS,), -1, dtype=torch.int32, device=device))
