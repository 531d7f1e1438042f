"""Destinations of a model's tensors during a load: the arena, separate allocations, or pinned host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from localq.engine.arena import Arena, arena_bytes
from localq.errors import ExitCode, LocalqError
from localq.planner.placement import Placement

HEAD, TABLE, INPUT_TABLE = "lm_head", "embed_tokens.weight", "embed_tokens_per_layer.weight"
LARGE = (TABLE, f"{HEAD}.weight", INPUT_TABLE)  # allocated separately


class Destinations:
    """Destinations of tensors. On a GPU all but embedding and head share one arena, allocated with the first."""

    def __init__(self, device: torch.device, dtype: torch.dtype, placement: Placement, sizes: list[int]) -> None:
        """Take the sizes of the blocks' tensors (`weights.block_sizes`)."""
        self.device, self.dtype, self.placement = device, dtype, placement
        self.packed = device.type != "cpu"  # quantized matrices stay quantized
        self._sizes = sizes
        self._arena: Arena | None = None

    def dense(self, target: str, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Place a tensor of the checkpoint as the parameter `target`, in `dtype`."""
        if not self.packed:
            return stored.to(dtype, copy=True, memory_format=torch.contiguous_format)  # it may be a view of the file
        if {TABLE: self.placement.embed, INPUT_TABLE: self.placement.input_table}.get(target) == "host":
            return _pin(stored.to(device="cpu", dtype=dtype))
        if target in LARGE:
            return stored.to(dtype).to(self.device)
        return self.block(stored.to(dtype))

    def block(self, tensor: Tensor) -> Tensor:
        """Copy into the arena."""
        return self._blocks().copy(tensor)

    def empty_block(self, shape: tuple[int, ...]) -> Tensor:
        """Return an uninitialized tensor of the arena, in the dtype of the model."""
        return self._blocks().empty(shape, self.dtype)

    def _blocks(self) -> Arena:
        if self._arena is None:
            self._arena = Arena(arena_bytes(self._sizes), self.device)
        return self._arena

    def alone(self, tensor: Tensor) -> Tensor:
        """Copy to the device, in a separate allocation."""
        return tensor.to(self.device)


def _pin(table: Tensor) -> Tensor:
    """Copy to pinned host memory, which the GPU reads directly."""
    try:
        return table.pin_memory()
    except RuntimeError as error:  # torch has no separate error for this
        why = f"{table.nbytes} bytes of host memory cannot be pinned ({str(error).splitlines()[0]})"
        step = "Use --embed device, or raise the locked-memory limit (ulimit -l)."
        raise LocalqError("--embed host", why, step, ExitCode.DOES_NOT_FIT) from None
