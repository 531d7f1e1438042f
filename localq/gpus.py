"""The GPUs of this machine, as NVIDIA's management library (NVML) tells them: no CUDA context, no torch.

Every question is asked by itself, because each may be unsupported: WSL tells nothing about processes, some virtual
GPUs nothing about memory. What cannot be told is None, and why is kept.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMED = 3  # processes of a refusal


@dataclass(frozen=True)
class Process:
    """A process that holds memory of a GPU; `bytes` is None where NVML may not tell, `name` empty where nobody does."""

    pid: int
    bytes: int | None
    name: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU. `index` counts as NVML counts (by bus id); sizes in bytes; None = not told."""

    index: int
    name: str
    uuid: str | None
    capability: tuple[int, int] | None
    total: int | None
    free: int | None
    processes: tuple[Process, ...] | None


@dataclass(frozen=True)
class Found:
    """What NVML tells: the driver's version (such as "580.65.06"), the GPUs, and what it refused to tell, with why."""

    driver_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    untold: tuple[str, ...] = ()


def probe() -> Found:
    """Ask NVML. Raises nothing: without NVML the answer is empty and says why."""
    import pynvml  # type: ignore[import-untyped]  # start-up cost: few verbs need it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Found(untold=(f"NVML: {error}",))
    untold: list[str] = []

    def ask(what: str, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except pynvml.NVMLError as error:
            untold.append(f"{what}: {error}")
            return None

    try:
        version = ask("driver version", pynvml.nvmlSystemGetDriverVersion)
        count = ask("number of GPUs", pynvml.nvmlDeviceGetCount) or 0
        gpus = tuple(gpu for index in range(count) if (gpu := _gpu(index, ask)) is not None)
        return Found(version, gpus, tuple(untold))
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # everything was told already
            pynvml.nvmlShutdown()


def _gpu(index: int, ask: Callable[..., Any]) -> Gpu | None:
    import pynvml

    device = ask(f"GPU {index}", pynvml.nvmlDeviceGetHandleByIndex, index)
    if device is None:
        return None
    name = ask(f"GPU {index} name", pynvml.nvmlDeviceGetName, device)
    uuid = ask(f"GPU {index} UUID", pynvml.nvmlDeviceGetUUID, device)
    capability = ask(f"GPU {index} compute capability", pynvml.nvmlDeviceGetCudaComputeCapability, device)
    memory = ask(f"GPU {index} memory", pynvml.nvmlDeviceGetMemoryInfo, device)
    total, free = (int(memory.total), int(memory.free)) if memory is not None else (None, None)
    held = processes(index, device, ask)
    return Gpu(index, name or "NVIDIA GPU", uuid, tuple(capability) if capability else None, total, free, held)


def processes(index: int, device: Any, ask: Callable[..., Any]) -> tuple[Process, ...] | None:
    """Processes that compute or draw on `device` (a handle of NVML), each once, the largest first; None = not told.

    `ask(what, question, *arguments)` gives the answer to a question, or None.
    """
    import pynvml

    kinds = (
        ("compute", pynvml.nvmlDeviceGetComputeRunningProcesses),
        ("graphics", pynvml.nvmlDeviceGetGraphicsRunningProcesses),
    )
    answers = [ask(f"GPU {index} {kind} processes", question, device) for kind, question in kinds]
    if all(answer is None for answer in answers):
        return None
    found = {each.pid: (each.pid, each.usedGpuMemory) for answer in answers for each in answer or ()}
    named = [Process(pid, size, _name(pid)) for pid, size in found.values()]
    return tuple(sorted(named, key=lambda each: -(each.bytes or 0)))


def _name(pid: int) -> str:
    """What the system calls a process; empty for one of another container, or that has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def of_uuid(uuid: str) -> Gpu | None:
    """The GPU of that UUID, as it is now."""
    return next((gpu for gpu in probe().gpus if gpu.uuid == uuid), None)


def closing(gpu: Gpu | None, own_pid: int | None = None) -> str:
    """How others could make room on `gpu`: "by closing firefox (pid 4711, 812 MiB)", the three largest."""
    others = [each for each in (gpu.processes if gpu else None) or () if each.pid != own_pid]
    if not others:
        return "by closing other programs that use the GPU"
    told = []
    for each in others[:NAMED]:
        size = "" if each.bytes is None else f", {each.bytes // 2**20:,} MiB"
        told.append(f"{each.name or 'a process'} (pid {each.pid}{size})")
    return f"by closing {', '.join(told)}"


def first_visible(gpus: tuple[Gpu, ...]) -> Gpu | None:
    """The GPU that CUDA counts as its first: by CUDA_VISIBLE_DEVICES (a number or a UUID's beginning), else number 0.

    CUDA may count other than NVML where GPUs differ (CUDA_DEVICE_ORDER); a machine with one GPU is always right.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    for gpu in gpus:
        if first == str(gpu.index) or (first.startswith("GPU-") and (gpu.uuid or "").startswith(first)):
            return gpu
    return None
