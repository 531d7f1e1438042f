"""The GPU memory of this process: the CUDA context is measured, and torch's allocator is limited to the rest.

The budget of a load covers everything: tensors, the context, loaded kernels, library handles, captured graphs. The
driver's figure for this process minus the allocator's gives the part outside the allocator. Where the driver does not
report it (WSL, containers with their own process ids), the drop of free device memory is used, which another program on
a shared card can disturb; implausible values are replaced by the planner's assumption.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from localq import gpus
from localq.engine.load.device import capture_stream
from localq.errors import ExitCode, LocalqError
from localq.planner import footprint
from localq.wording import human_bytes

PAGE = 2 * footprint.MIB  # granularity of the driver and of the allocator's large blocks
_PLAUSIBLE = (32 * footprint.MIB, 2048 * footprint.MIB)  # of a CUDA context with its kernels
# Device -> bytes of its context, and whether they include kernels and handles. A context lives as long as the process.
_contexts: dict[int, tuple[int, bool]] = {}


@dataclass(frozen=True)
class VramBudget:
    """The memory budget of one load, in bytes.

    budget     limit for the model and everything around it; `hard` where the user set it
    measured   CUDA's part so far; context: with the expected rest
    others     earlier tensors of this process, which count against its budget
    free, reserved  of the device and of the allocator when the load started
    available  the most that the process could take when the load started
    limit      of the allocator; None before `hold`
    """

    device: torch.device
    budget: int
    hard: bool
    measured: int
    context: int
    others: int
    free: int
    reserved: int
    available: int
    limit: int | None = None

    def hold(self, outside: int) -> VramBudget:
        """Limit the allocator to the budget minus `outside`, the memory outside the allocator."""
        total = torch.cuda.mem_get_info(self.device)[1]
        most = min(max(0, self.budget + self.others - outside), total)
        torch.cuda.set_per_process_memory_fraction(most / total, self.device)
        return replace(self, limit=most)

    def reserve(self, count: int) -> None:
        """Make the allocator hold `count` more bytes in one block.

        Fewer where they are not free, because its blocks hold more unused memory than planned, which is usable.
        """
        free = torch.cuda.mem_get_info(self.device)[0]
        if self.limit is not None:
            free = min(free, self.limit - torch.cuda.memory_reserved(self.device))
        torch.empty(max(0, min(count, free // PAGE * PAGE)), dtype=torch.uint8, device=self.device)

    def settle(self, ledger: dict[str, int], name: str) -> dict[str, int]:
        """Complete `ledger` after everything has run: CUDA's part as measured, unused allocator memory as scratch.

        Raises LocalqError (exit 3) where the user's budget is exceeded.
        """
        free = torch.cuda.mem_get_info(self.device)[0]
        reserved = torch.cuda.memory_reserved(self.device)
        grown = (self.free - free) - (reserved - self.reserved)
        graphs = ledger.get("graphs", 0)
        outside = _outside(self.device)
        context = self.measured + max(0, grown - graphs) if outside is None else outside - graphs
        if not _PLAUSIBLE[0] <= context <= _PLAUSIBLE[1]:
            context = self.context
        _contexts[_index(self.device)] = (context, True)
        idle = reserved - torch.cuda.memory_allocated(self.device)
        taken = reserved + context + graphs
        if self.hard and taken > self.budget + self.others:
            why = f"needs {human_bytes(taken)}, but only {human_bytes(self.budget + self.others)} is allowed"
            raise LocalqError(
                name, why, "Raise the limit (--vram), or use a shorter context (--ctx).", ExitCode.DOES_NOT_FIT
            )
        return {**ledger, "scratch": ledger.get("scratch", 0) + idle, "cuda_context": context}


def free_before_context() -> dict[str, int]:
    """Return UUID -> free bytes of every GPU by NVML; empty once this process has a CUDA context."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's gap
        return {}
    return {gpu.uuid: gpu.free for gpu in gpus.probe().gpus if gpu.uuid is not None and gpu.free is not None}


def open_budget(
    device: torch.device, vram_bytes: int | None, before: dict[str, int], reserve_bytes: int = 0
) -> VramBudget:
    """Open the budget of a load on `device`: what is free less `reserve_bytes`, at most `vram_bytes`.

    Lifts an earlier limit. before: of `free_before_context`. Call `load.free_memory` first.
    """
    if str(device) == "cuda":  # a limit is set on a device with a number
        device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    context, complete = _context(device, before)
    free = torch.cuda.mem_get_info(device)[0]
    reserved, others = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    available = max(0, free + reserved + context - reserve_bytes)
    budget = available if vram_bytes is None else min(available, vram_bytes)
    later = footprint.MORE_KERNELS_BYTES if complete else footprint.KERNELS_BYTES
    return VramBudget(
        device, budget - others, vram_bytes is not None, context, context + later, others, free, reserved, available
    )


def process_bytes(device: torch.device) -> int | None:
    """Return the GPU memory of this process by the driver, with its context; None where it does not report it."""
    if device.type != "cuda":
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    processes = next((gpu.processes for gpu in gpus.probe().gpus if gpu.uuid == uuid), None)
    return next((each.bytes for each in processes or () if each.pid == os.getpid()), None)


def _outside(device: torch.device) -> int | None:
    """Return the part of `process_bytes` outside the allocator; None where it is unknown or implausible."""
    total = process_bytes(device)
    outside = None if total is None else total - torch.cuda.memory_reserved(device)
    return outside if outside is not None and _PLAUSIBLE[0] <= outside <= _PLAUSIBLE[1] else None


def _context(device: torch.device, before: dict[str, int]) -> tuple[int, bool]:
    """Return CUDA's part now, and whether it includes kernels and handles."""
    known = _contexts.get(_index(device))
    if known is None:
        _start(device)
    taken = _outside(device)
    if taken is None and known is not None:
        return known
    if taken is None:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        taken = before.get(uuid, 0) - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
    if not _PLAUSIBLE[0] <= taken <= _PLAUSIBLE[1]:
        taken = footprint.CUDA_CONTEXT_BYTES - footprint.KERNELS_BYTES
    _contexts[_index(device)] = (taken, known is not None and known[1])
    return _contexts[_index(device)]


def _start(device: torch.device) -> None:
    """Make CUDA and torch allocate what they keep: context, streams, cuBLAS, the memory of a first graph.

    So it is measured before the plan, and not counted as graph memory later.
    """
    row = torch.zeros(16, 16, dtype=torch.float16, device=device)
    product = torch.mm(row, row)
    graph = torch.cuda.CUDAGraph()
    product.add_(row)  # loads the kernel before it is captured
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, stream=capture_stream(device), capture_error_mode="thread_local"):
        product.add_(row)
    graph.replay()
    torch.cuda.synchronize(device)
    del row, product, graph
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def cublas_workspace(device: torch.device, dtype: torch.dtype) -> int:
    """Allocate the workspace that torch keeps for cuBLAS on this device; returns its bytes."""
    torch._C._cuda_clearCublasWorkspaces()
    row = torch.zeros(16, 16, dtype=dtype, device=device)
    product = torch.empty_like(row)
    before = torch.cuda.memory_allocated(device)
    torch.mm(row, row, out=product)
    return torch.cuda.memory_allocated(device) - before


def _index(device: torch.device) -> int:
    return device.index or 0
