"""Where the tensors of a model go while it is loaded: the arena, memory of their own, or pinned host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from localq.engine.arena import Arena, arena_bytes
from localq.errors import ExitCode, LocalqError
from localq.planner.placement import Placement

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
