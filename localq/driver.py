"""The NVIDIA driver, and whether it, torch and localq's kernels work together. No torch.

`engine.load.device` collects the facts from torch, `localq doctor` without it; both are diagnosed here, in the same
words.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from dataclasses import dataclass

KERNEL_NODES = ("/proc/driver/nvidia/version", "/dev/nvidiactl")  # exist when the driver's kernel module is loaded
WSL_NODE = "/dev/dxg"  # WSL, where the driver runs on the Windows side
CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE = 0, 100  # CUresult, CUDA driver API
_RESTART = "Restart the machine."
# CUresult (and the runtime's 35) -> cause and remedy.
FAILURES: dict[int, tuple[str, str]] = {
    34: ("libcuda.so.1 is a stub from a CUDA toolkit", "Remove the toolkit's `stubs` folder from LD_LIBRARY_PATH."),
    35: ("the driver is too old for torch's CUDA version", "Update the driver."),
    46: ("another program has exclusive access to the GPU", "Close that program; `nvidia-smi` lists it."),
    101: ("the selected GPU does not exist", "Fix CUDA_VISIBLE_DEVICES."),
    209: ("the driver does not support this GPU", "Update the driver; very old GPUs are no longer supported."),
    802: ("the GPU fabric is not ready", "Start Fabric Manager, or wait until it is running."),
    803: (
        "the driver library and the kernel module have different versions, probably because of a driver update",
        _RESTART,
    ),
    804: ("the CUDA compatibility libraries do not support this GPU", "Remove cuda-compat from LD_LIBRARY_PATH."),
    999: (
        "the driver or the GPU failed, possibly because the machine was suspended",
        "Reload the nvidia_uvm kernel module, or restart the machine.",
    ),
}
_MODULE_VERSION = re.compile(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)")


@dataclass(frozen=True)
class Driver:
    """State of the NVIDIA driver.

    present      a driver is installed, working or not
    why_not      "" or why it gives access to no GPU
    cuda_version the newest CUDA it supports, as (major, minor); (0, 0) unknown
    cure         "" or the remedy for `why_not`
    """

    present: bool
    why_not: str = ""
    cuda_version: tuple[int, int] = (0, 0)
    cure: str = ""


@dataclass(frozen=True)
class CudaStack:
    """Driver, torch and kernels, which together decide whether the GPU works.

    torch_cuda   the CUDA version torch was built with, None for a CPU build
    torch_why    "" or why torch cannot use the GPU
    kernels_why  "" or why localq's kernels cannot be used
    """

    driver: Driver
    torch_cuda: str | None
    torch_why: str = ""
    kernels_why: str = ""


def probe_driver() -> Driver:
    """The driver, as libcuda reports it. A container with the library but no GPU counts as no driver."""
    loaded = any(os.path.exists(node) for node in KERNEL_NODES)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        why = f"libcuda.so.1 cannot be loaded ({error})"
        return Driver(present=loaded, why_not=why if loaded else "no NVIDIA driver")
    version = ctypes.c_int(0)
    if cuda.cuDriverGetVersion(ctypes.byref(version)) != CUDA_SUCCESS:
        version = ctypes.c_int(0)
    served = (version.value // 1000, version.value % 1000 // 10)
    status = cuda.cuInit(0)
    if status == CUDA_SUCCESS:
        return Driver(present=True, cuda_version=served)
    if status == CUDA_ERROR_NO_DEVICE:
        if not loaded and not os.path.exists(WSL_NODE):
            return Driver(present=False, why_not="no NVIDIA driver")
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is None:
            return Driver(present=True, why_not="it finds no GPU", cuda_version=served)
        why = f'CUDA_VISIBLE_DEVICES="{hidden}" hides every GPU'
        return Driver(True, why, served, "Unset CUDA_VISIBLE_DEVICES, or set it to an existing GPU.")
    words, cure = FAILURES.get(status, ("", ""))
    module = f"; the kernel module is {_module_version()}" if status == 803 and _module_version() else ""
    detail = f": {words}{module}" if words else ""
    return Driver(True, f"initialization failed (CUDA error {status}{detail})", served, cure)


def _module_version() -> str:
    """Version of the driver's kernel module, such as "580.65.06"; empty if unknown."""
    with contextlib.suppress(OSError), open(KERNEL_NODES[0], encoding="utf-8", errors="replace") as file:
        found = _MODULE_VERSION.search(file.read(4096))
        return found[1] if found else ""
    return ""


def diagnose(facts: CudaStack) -> tuple[str, str] | None:
    """Return why the GPU cannot be used, and the remedy; None if it works."""
    driver = facts.driver
    if not driver.present:
        return "no NVIDIA driver found", "Install the NVIDIA driver."
    if facts.torch_cuda is None:
        return (
            "an NVIDIA driver is installed, but the installed torch is a CPU-only build",
            "Install a CUDA build of torch in this environment.",
        )
    needed = _major(facts.torch_cuda)
    if 0 < driver.cuda_version[0] < needed:  # a driver supports all minor versions of its CUDA major version
        served = ".".join(map(str, driver.cuda_version))
        why = f"the NVIDIA driver is too old: it supports CUDA {served}, but torch needs {needed}.0 or newer"
        return why, "Update the driver, or install a torch build for an older CUDA version."
    if driver.why_not:
        step = driver.cure or "Check that `nvidia-smi` lists the GPU; after a driver update, restart the machine."
        return f"an NVIDIA driver is installed, but {driver.why_not}", step
    if facts.torch_why:
        return f"torch cannot use the GPU: {facts.torch_why}", "Run `localq doctor` for details."
    if facts.kernels_why:
        step = "Run `make chat` again in your clone, or install a localq wheel with kernels for this GPU."
        return f"localq's CUDA kernels cannot be used: {facts.kernels_why}", step
    return None


def _major(version: str) -> int:
    with contextlib.suppress(ValueError):
        return int(version.split(".")[0])
    return 0
