"""Which device the engine runs on, and why not the one that was hoped for.

`auto` takes the CPU only where there is no NVIDIA driver, and says so. Everywhere else a GPU that cannot be used is an
error with its cause: nothing ever falls back to the CPU without a word. CUDA_VISIBLE_DEVICES is respected, because
both the driver and torch read it. The facts are gathered by `probe` and judged by `pick`, so that tests can invent
machines.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from localq import kernels
from localq.errors import ExitCode, LocalqError, usage_error

NO_DRIVER_NOTE = "no NVIDIA driver found: running on the CPU"
KERNEL_NODES = ("/proc/driver/nvidia/version", "/dev/nvidiactl")  # there when the kernel half of the driver is loaded
WSL_NODE = "/dev/dxg"  # under WSL the driver lives on the Windows side
CUDA_SUCCESS, CUDA_ERROR_NO_DEVICE = 0, 100  # CUresult, CUDA driver API
_CPU_WAY = "Use `--device cpu` to run without the GPU."


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
    """Everything that `pick` decides by.

    torch_cuda   the CUDA version torch was built with, None for a CPU build
    torch_why    "" or why torch cannot use the GPU
    kernels_why  "" or why localq's kernels cannot be used
    """

    driver: Driver
    torch_cuda: str | None
    torch_why: str = ""
    kernels_why: str = ""


@dataclass(frozen=True)
class Choice:
    """The device, and lines that the user must be told."""

    device: torch.device
    notes: tuple[str, ...] = ()


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


def probe() -> Machine:
    """The facts of this machine. Starts the CUDA context where one can be had."""
    driver = probe_driver()
    if not driver.present or driver.why_not:
        return Machine(driver, torch.version.cuda)
    return Machine(driver, torch.version.cuda, _torch_why(), "" if kernels.available() else kernels.why_not())


def _torch_why() -> str:
    if torch.version.cuda is None:
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's gap
    except (RuntimeError, AssertionError) as error:  # torch raises both for drivers it cannot use
        return str(error).splitlines()[0]
    major, minor = torch.cuda.get_device_capability(0)
    built = [_capability(name) for name in torch.cuda.get_arch_list() if name.startswith("sm_")]
    if any(m == major and n <= minor for m, n in built):
        return ""
    return f"this torch has no machine code for {torch.cuda.get_device_name(0)} (sm_{major}{minor})"


def _capability(name: str) -> tuple[int, int]:
    digits = "".join(letter for letter in name.removeprefix("sm_") if letter.isdigit())
    return int(digits[:-1]), int(digits[-1])


def pick(device: str, machine: Callable[[], Machine] = probe) -> Choice:
    """The device that "auto", "cpu" or "cuda" means here.

    Raises LocalqError: exit 2 for another word, exit 7 when a GPU is wanted (or a driver is there) and cannot be used.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise usage_error("--device", f"{device!r} is not a device", "Use auto, cpu or cuda.")
    if device == "cpu":
        return Choice(torch.device("cpu"))
    facts = machine()
    if not facts.driver.present and device == "auto":
        return Choice(torch.device("cpu"), (NO_DRIVER_NOTE,))
    if cause := _cause(facts):
        why, next_step = cause
        raise LocalqError("GPU", why, f"{next_step} {_CPU_WAY}".strip(), ExitCode.NO_DEVICE)
    return Choice(torch.device("cuda", 0))


def _cause(facts: Machine) -> tuple[str, str] | None:
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
        return f"an NVIDIA driver is installed, but {driver.why_not}", "`localq doctor` shows what was found."
    if facts.torch_why:
        return f"torch cannot use the GPU: {facts.torch_why}", "`localq doctor` shows what was found."
    if facts.kernels_why:
        return f"localq's CUDA kernels are missing: {facts.kernels_why}", "Install localq with its kernels."
    return None


def _major(version: str) -> int:
    with contextlib.suppress(ValueError):
        return int(version.split(".")[0])
    return 0


def device_name(device: torch.device) -> str:
    """What to call the device in messages."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
