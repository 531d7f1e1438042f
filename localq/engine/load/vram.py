"""What this process takes of a GPU: the CUDA context is measured, and torch's allocator is held to what is left.

The budget of a load covers everything: tensors, the context, loaded kernels, library handles, captured graphs. What is
not the allocator's is what the driver says of this process. Where it may not tell (WSL, containers with process ids of
their own), it is the memory of the device that went away, so on a shared card another program's change in the same
moment would be counted; values that cannot be are replaced by the planner's assumption.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from localq import gpus
from localq.engine.load.device import capture_stream
from localq.errors import ExitCode, LocalqError
from localq.planner import footprint

PAGE = 2 * footprint.MIB  # the driver gives memory in these, and the allocator takes large blocks so
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
    available  what the process could take at most when the load began
    limit      what the allocator may take; None before `hold`
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

    def hold(self, outside: int) -> Held:
        """From here on the allocator takes no more than the budget less `outside`, what is not its own."""
        total = torch.cuda.mem_get_info(self.device)[1]
        most = min(max(0, self.budget + self.others - outside), total)
        torch.cuda.set_per_process_memory_fraction(most / total, self.device)
        return replace(self, limit=most)

    def reserve(self, count: int) -> None:
        """Make the allocator hold so many bytes more in one block.

        Less where that is not to be had, because its blocks hold more unused than was planned: there is room in those.
        """
        free = torch.cuda.mem_get_info(self.device)[0]
        if self.limit is not None:
            free = min(free, self.limit - torch.cuda.memory_reserved(self.device))
        torch.empty(max(0, min(count, free // PAGE * PAGE)), dtype=torch.uint8, device=self.device)

    def settled(self, ledger: dict[str, int], name: str) -> dict[str, int]:
        """`ledger` once everything has run: with CUDA's part as it is, and what the allocator keeps as scratch.

        Raises LocalqError (exit 3) where a budget that the user set is exceeded.
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


def begin(device: torch.device, vram_bytes: int | None, before: dict[str, int], reserve_bytes: int = 0) -> Held:
    """The budget of a load on `device`: `vram_bytes` at most, never more than there is less `reserve_bytes`.

    Lifts an earlier limit.

    `before` is what `free_before_context` said. The allocator must keep nothing for nobody (`load.free_memory`).
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
    return Held(
        device, budget - others, vram_bytes is not None, context, context + later, others, free, reserved, available
    )


def process_bytes(device: torch.device) -> int | None:
    """Memory of the GPU that the driver says this process holds, its context included; None where it does not tell."""
    if device.type != "cuda":
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    processes = next((gpu.processes for gpu in gpus.probe().gpus if gpu.uuid == uuid), None)
    return next((each.bytes for each in processes or () if each.pid == os.getpid()), None)


def _outside(device: torch.device) -> int | None:
    """Of these, what is not the allocator's; None where they cannot be told, or cannot be meant."""
    told = process_bytes(device)
    outside = None if told is None else told - torch.cuda.memory_reserved(device)
    return outside if outside is not None and _PLAUSIBLE[0] <= outside <= _PLAUSIBLE[1] else None


def _context(device: torch.device, before: dict[str, int]) -> tuple[int, bool]:
    """CUDA's part as it is now, and whether everything has run before."""
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
    """Make CUDA and torch take what they take once and keep: context, streams, cuBLAS, what a first graph needs.

    So it is measured before anything is planned, and not taken for the graphs' later.
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
    """Bytes of the workspace that torch keeps for cuBLAS on this device; makes it."""
    torch._C._cuda_clearCublasWorkspaces()
    row = torch.zeros(16, 16, dtype=dtype, device=device)
    product = torch.empty_like(row)
    before = torch.cuda.memory_allocated(device)
    torch.mm(row, row, out=product)
    return torch.cuda.memory_allocated(device) - before


def _index(device: torch.device) -> int:
    return device.index or 0
