"""Where the tensors of a model go while it is loaded: the arena, memory of their own, or pinned host memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from localq.errors import ExitCode, LocalqError
from localq.planner.placement import Placement

ALIGNMENT = 512  # bytes, as torch aligns


def arena_bytes(sizes: list[int]) -> int:
    """Bytes of an arena for tensors of so many bytes each."""
    return sum(_aligned(size) for size in sizes)


class Arena:
    """Lives as long as one of its tensors does."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        """Allocates `size` bytes (`arena_bytes`)."""
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in what is free. Raises ValueError where that is too little."""
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > self._bytes.numel():
            left = self._bytes.numel() - self._used
            raise ValueError(f"arena: {left} bytes are left, {size} are needed for {list(shape)} of {dtype}")
        part = self._bytes[self._used : self._used + size]
        self._used += _aligned(size)
        return part.view(dtype).view(shape)

    def placed(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, from whatever device, in what is free."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


HEAD, TABLE = "lm_head", "embed_tokens.weight"
LARGE = (TABLE, f"{HEAD}.weight")  # allocated by themselves


class Places:
    """Where tensors go. On a GPU all but embedding and head lie in one arena, made when the first of them comes."""

    def __init__(self, device: torch.device, dtype: torch.dtype, placement: Placement, sizes: list[int]) -> None:
        """`sizes`: what `block_sizes` says."""
        self.device, self.dtype, self.placement = device, dtype, placement
        self.packed = device.type != "cpu"  # quantized matrices stay so
        self._sizes = sizes
        self._arena: Arena | None = None

    def dense(self, target: str, stored: Tensor) -> Tensor:
        """A tensor of the checkpoint as the parameter `target`, in the type of the model."""
        if not self.packed:
            return stored.to(
                self.dtype, copy=True, memory_format=torch.contiguous_format
            )  # it may be a view of the file
        if target == TABLE and self.placement.embed == "host":
            return _pinned(stored.to(device="cpu", dtype=self.dtype))
        if target in LARGE:
            return stored.to(self.dtype).to(self.device)
        return self.block(stored.to(self.dtype))

    def block(self, tensor: Tensor) -> Tensor:
        """A copy in the arena."""
        if self._arena is None:
            self._arena = Arena(arena_bytes(self._sizes), self.device)
        return self._arena.placed(tensor)

    def alone(self, tensor: Tensor) -> Tensor:
        """On the device, in memory of its own."""
        return tensor.to(self.device)


def _pinned(table: Tensor) -> Tensor:
    """A copy that the GPU can read where it lies."""
    try:
        return table.pin_memory()
    except RuntimeError as error:  # torch has no kind of its own for memory that cannot be locked
        why = f"{table.nbytes} bytes of host memory cannot be pinned ({str(error).splitlines()[0]})"
        step = "Use --embed device, or let programs lock more memory (ulimit -l)."
        raise LocalqError("--embed host", why, step, ExitCode.DOES_NOT_FIT) from None
