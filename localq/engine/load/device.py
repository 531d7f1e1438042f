"""The device that the engine runs on, and why a requested one cannot be used.

`auto` takes the CPU only where there is no NVIDIA driver, and says so. Otherwise an unusable GPU is an error with its
cause: there is no silent fallback to the CPU. CUDA_VISIBLE_DEVICES is respected, because both the driver and torch read
it. `probe` collects the facts and `pick` decides, so that tests can invent machines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from localq import driver, kernels
from localq.driver import CudaStack
from localq.errors import ExitCode, LocalqError, usage_error

NO_DRIVER_NOTE = "no NVIDIA driver found; running on the CPU"
_CPU_WAY = "Use `--device cpu` to run without the GPU."


@dataclass(frozen=True)
class DeviceChoice:
    """The device, and notes for the user."""

    device: torch.device
    notes: tuple[str, ...] = ()


def probe() -> CudaStack:
    """Collect the facts of this machine. Starts the CUDA context where that works."""
    found = driver.probe_driver()
    if not found.present or found.why_not:
        return CudaStack(found, torch.version.cuda)
    torch_why = _torch_why()
    if torch.version.cuda is None or torch_why:
        return CudaStack(found, torch.version.cuda, torch_why, kernels.why_not())
    return CudaStack(found, torch.version.cuda, "", kernels.why_not_on(torch.cuda.get_device_capability(0)))


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
    return f"the installed torch does not support {torch.cuda.get_device_name(0)} (sm_{major}{minor})"


def _capability(name: str) -> tuple[int, int]:
    digits = "".join(letter for letter in name.removeprefix("sm_") if letter.isdigit())
    return int(digits[:-1]), int(digits[-1])


def pick(device: str, machine: Callable[[], CudaStack] = probe) -> DeviceChoice:
    """Return the device that "auto", "cpu" or "cuda" means here.

    Raises LocalqError: exit 2 for another word, exit 7 for a GPU that is requested, or has a driver, and is unusable.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise usage_error("--device", f"{device!r} is not a supported device", "Use auto, cpu or cuda.")
    if device == "cpu":
        return DeviceChoice(torch.device("cpu"))
    facts = machine()
    if not facts.driver.present and device == "auto":
        return DeviceChoice(torch.device("cpu"), (NO_DRIVER_NOTE,))
    if cause := driver.diagnose(facts):
        why, next_step = cause
        raise LocalqError("GPU", why, f"{next_step} {_CPU_WAY}".strip(), ExitCode.NO_DEVICE)
    return DeviceChoice(torch.device("cuda", 0))


def device_name(device: torch.device) -> str:
    """Return the name of the device for messages."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def device_uuid(device: torch.device) -> str:
    """Return NVML's id of a GPU: "GPU-5a1b..."; empty for the CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for captures: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's gap
