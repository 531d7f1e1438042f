"""The NVIDIA driver, and whether it, torch and localq's kernels can work together. Knows no torch.

The facts of a machine are gathered elsewhere (`engine.device` asks torch itself, `localq doctor` does not load it) and
judged here, so that both give the same verdict in the same words.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass

KERNEL_NODES = ("/proc/driver/nvidia/version", "/dev/nvidiactl")  # there when the kernel half of the driver is loaded
WSL_NODE = "/dev/dxg"  # under WSL the driver lives on the Windows side
CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE = 0, 100  # CUresult, CUDA driver API


@dataclass(frozen=True)
class Driver:
    """What the NVIDIA driver says of itself.

    present      a driver is installed, working or not
    why_not      "" or why no GPU can be reached through it
    cuda_version the newest CUDA it serves, as (major, minor); (0, 0) unknown
    """

    present: bool
    why_not: str = ""
    cuda_version: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Machine:
    """Everything that decides whether the GPU can be used.

    torch_cuda   the CUDA version torch was built with, None for a CPU build
    torch_why    "" or why torch cannot use the GPU
    kernels_why  "" or why localq's kernels cannot be used
    """

    driver: Driver
    torch_cuda: str | None
    torch_why: str = ""
    kernels_why: str = ""


def probe_driver() -> Driver:
    """Ask libcuda. A container without GPUs may carry the library but no driver: that counts as no driver."""
    loaded = any(os.path.exists(node) for node in KERNEL_NODES)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        why = f"its library libcuda.so.1 cannot be loaded ({error})"
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
        why = "it finds no GPU" if hidden is None else f'CUDA_VISIBLE_DEVICES="{hidden}" leaves no GPU visible'
        return Driver(present=True, why_not=why, cuda_version=served)
    return Driver(present=True, why_not=f"it cannot be initialised (CUDA error {status})", cuda_version=served)


def cause(facts: Machine) -> tuple[str, str] | None:
    """Why the GPU cannot be used and what would cure it; None when it can."""
    driver = facts.driver
    if not driver.present:
        return "no NVIDIA driver found", "Install the driver of the card."
    if facts.torch_cuda is None:
        return (
            "an NVIDIA driver is installed, but the installed torch is a CPU build",
            "Install a torch build with CUDA into this environment.",
        )
    needed = _major(facts.torch_cuda)
    if 0 < driver.cuda_version[0] < needed:  # any driver of a CUDA major version serves all its minor versions
        served = ".".join(map(str, driver.cuda_version))
        why = f"the NVIDIA driver is too old: it serves CUDA {served}, the installed torch needs {needed}.0 or newer"
        return why, "Update the driver, or install a torch built for the older CUDA."
    if driver.why_not:
        step = "See whether `nvidia-smi` lists the GPU; after an update of the driver, restart the machine."
        return f"an NVIDIA driver is installed, but {driver.why_not}", step
    if facts.torch_why:
        return f"torch cannot use the GPU: {facts.torch_why}", "`localq doctor` shows what was found."
    if facts.kernels_why:
        step = "Install localq with kernels for this GPU: from a wheel that has them, or where nvcc is found."
        return f"localq's CUDA kernels cannot be used: {facts.kernels_why}", step
    return None


def _major(version: str) -> int:
    with contextlib.suppress(ValueError):
        return int(version.split(".")[0])
    return 0
