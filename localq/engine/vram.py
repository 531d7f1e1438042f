"""What this process takes of a GPU: the CUDA context is measured, and torch's allocator is held to what is left.

The budget of a load covers everything: tensors, the context, loaded kernels, library handles, captured graphs. What is
not the allocator's is read from the device as the memory that went away, so on a shared card another program's change
in the same moment would be counted; values that cannot be are replaced by the planner's assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from localq import footprint, gpus
from localq.errors import ExitCode, LocalqError

_PLAUSIBLE = (32 * footprint.MIB, 2048 * footprint.MIB)  # of a CUDA context with its kernels
# Device -> bytes of its context, and whether kernels and handles are in it. A context lives as long as the process.
_contexts: dict[int, tuple[int, bool]] = {}


@dataclass(frozen=True)
class Held:
    """The memory of one load, in bytes.

    budget     what the model and all around it may take; `hard` where the user said so
    measured   CUDA's part so far; context: the same with what is assumed to come
    others     tensors of this process from before, which count against the budget of the process
    free, reserved  of the device and of the allocator when the load began
    """

    device: torch.device
    budget: int
    hard: bool
    measured: int
    context: int
    others: int
    free: int
    reserved: int

    def hold(self, outside: int) -> None:
        """From here on the allocator takes no more than the budget less `outside`, what is not its own."""
        total = torch.cuda.mem_get_info(self.device)[1]
        most = self.budget + self.others - outside
        torch.cuda.set_per_process_memory_fraction(max(0.0, min(1.0, most / total)), self.device)

    def settled(self, ledger: dict[str, int], name: str) -> dict[str, int]:
        """`ledger` once everything has run: with CUDA's part as it is, and what the allocator keeps as scratch.

        Raises LocalqError (exit 3) where a budget that the user set is exceeded.
        """
        free = torch.cuda.mem_get_info(self.device)[0]
        reserved = torch.cuda.memory_reserved(self.device)
        grown = (self.free - free) - (reserved - self.reserved)
        graphs = ledger.get("graphs", 0)
        context = self.measured + max(0, grown - graphs)
        if not _PLAUSIBLE[0] <= context <= _PLAUSIBLE[1]:
            context = self.context
        _contexts[_index(self.device)] = (context, True)
        idle = reserved - torch.cuda.memory_allocated(self.device)
        taken = reserved + context + graphs
        if self.hard and taken > self.budget + self.others:
            why = f"it took {taken} bytes of the {self.budget + self.others} allowed"
            raise LocalqError(
                name, why, "Allow more (--vram), or use a shorter context (--ctx).", ExitCode.DOES_NOT_FIT
            )
        return {**ledger, "scratch": ledger.get("scratch", 0) + idle, "cuda_context": context}


def free_before_context() -> dict[str, int]:
    """UUID -> free bytes of every GPU, as NVML tells, while this process has no CUDA context; empty once it has."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's gap
        return {}
    return {gpu.uuid: gpu.free for gpu in gpus.probe().gpus if gpu.uuid is not None and gpu.free is not None}


def begin(device: torch.device, vram_bytes: int | None, before: dict[str, int]) -> Held:
    """The budget of a load on `device`: `vram_bytes` at most, never more than there is. Lifts an earlier limit.

    `before` is what `free_before_context` said. The allocator must keep nothing for nobody (`load.free_memory`).
    """
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    context, complete = _context(device, before)
    free = torch.cuda.mem_get_info(device)[0]
    reserved, others = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    available = free + reserved + context
    budget = available if vram_bytes is None else min(available, vram_bytes)
    later = 0 if complete else footprint.KERNELS_BYTES
    return Held(device, budget - others, vram_bytes is not None, context, context + later, others, free, reserved)


def _context(device: torch.device, before: dict[str, int]) -> tuple[int, bool]:
    if (known := _contexts.get(_index(device))) is not None:
        return known
    torch.zeros(1, device=device)  # the context is there now
    torch.cuda.synchronize(device)
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    taken = before.get(uuid, 0) - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
    if not _PLAUSIBLE[0] <= taken <= _PLAUSIBLE[1]:
        taken = footprint.CUDA_CONTEXT_BYTES - footprint.KERNELS_BYTES
    _contexts[_index(device)] = (taken, False)
    return _contexts[_index(device)]


def cublas_workspace(device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of the workspace that torch keeps for cuBLAS on this device; makes it."""
    torch._C._cuda_clearCublasWorkspaces()
    row = torch.zeros(16, 16, dtype=dtype, device=device)
    product = torch.empty_like(row)
    before = torch.cuda.memory_allocated(device)
    torch.mm(row, row, out=product)
    return torch.cuda.memory_allocated(device) - before


def _index(device: torch.device) -> int:
    return device.index or 0
