"""The NVIDIA driver, and whether it, torch and localq's kernels can work together. Knows no torch.

The facts of a machine are gathered elsewhere (`engine.device` asks torch itself, `localq doctor` does not load it) and
judged here, so that both give the same verdict in the same words.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from dataclasses import dataclass

KERNEL_NODES = ("/proc/driver/nvidia/version", "/dev/nvidiactl")  # there when the kernel half of the driver is loaded
WSL_NODE = "/dev/dxg"  # under WSL the driver lives on the Windows side
CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE = 0, 100  # CUresult, CUDA driver API
_RESTART = "Restart the machine."
# CUresult (and 35, which the runtime has for the same) -> what it means for a user, and what cures it.
FAILURES: dict[int, tuple[str, str]] = {
    34: ("libcuda.so.1 is the stub of a CUDA toolkit", "Take the toolkit's `stubs` folder out of LD_LIBRARY_PATH."),
    35: ("it is older than the CUDA that it is asked for", "Update the driver."),
    46: ("the GPU is not available: another program may hold it for itself alone", "Close it; see `nvidia-smi`."),
    101: ("it was given a GPU that does not exist", "Correct CUDA_VISIBLE_DEVICES."),
    209: ("it has no code for this GPU", "Update the driver; very old GPUs are no longer served."),
    802: ("the machine's GPU fabric is not ready", "Start the fabric manager, or wait until it has started."),
    803: ("its library and its kernel module are of different versions, as after an update", _RESTART),
    804: ("the CUDA compatibility libraries do not serve this GPU", "Take cuda-compat out of LD_LIBRARY_PATH."),
    999: ("the driver or the GPU has failed, as it may after suspend", f"{_RESTART} Or reload the module nvidia_uvm."),
}
_MODULE_VERSION = re.compile(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)")


@dataclass(frozen=True)
class Driver:
    """What the NVIDIA driver says of itself.

    present      a driver is installed, working or not
    why_not      "" or why no GPU can be reached through it
    cuda_version the newest CUDA it serves, as (major, minor); (0, 0) unknown
    cure         "" or what would help against `why_not`
    """

    present: bool
    why_not: str = ""
    cuda_version: tuple[int, int] = (0, 0)
    cure: str = ""


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
        if hidden is None:
            return Driver(present=True, why_not="it finds no GPU", cuda_version=served)
        why = f'CUDA_VISIBLE_DEVICES="{hidden}" leaves no GPU visible'
        return Driver(True, why, served, "Unset CUDA_VISIBLE_DEVICES, or name a GPU that there is.")
    words, cure = FAILURES.get(status, ("", ""))
    module = f"; its kernel module is {_module_version()}" if status == 803 and _module_version() else ""
    detail = f": {words}{module}" if words else ""
    return Driver(True, f"it cannot be initialised (CUDA error {status}{detail})", served, cure)


def _module_version() -> str:
    """Of the half of the driver that is in the kernel: "580.65.06"; empty where it does not tell."""
    with contextlib.suppress(OSError), open(KERNEL_NODES[0], encoding="utf-8", errors="replace") as file:
        found = _MODULE_VERSION.search(file.read(4096))
        return found[1] if found else ""
    return ""


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
        step = (
            driver.cure or "See whether `nvidia-smi` lists the GPU; after an update of the driver, restart the machine."
        )
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
