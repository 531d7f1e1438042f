"""The conditions of a measurement: device, driver, clocks, power, versions, commit, host. Unknown facts are None."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import localq
from localq import places
from localq.bench.conditions import power
from localq.engine.load import device as devices


def conditions(device: torch.device, seed: int) -> dict[str, Any]:
    """Return the conditions as a flat dict, in printing order; units in the key names."""
    facts: dict[str, Any] = {"device": devices.device_name(device)}
    if device.type == "cuda":
        facts |= {"sm": "".join(map(str, torch.cuda.get_device_capability(device))), **gpu_state(device)}
    return {
        **facts,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "localq": localq.__version__,
        **commit(places.PACKAGE_PARENT),
        "seed": seed,
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "host_cpu": host_cpu(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
    }


_QUESTIONS: dict[str, Callable[[Any, Any], Any]] = {  # of pynvml and a card
    "driver": lambda nvml, card: nvml.nvmlSystemGetDriverVersion(),
    "sm_clock_mhz": lambda nvml, card: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM),
    "max_sm_clock_mhz": lambda nvml, card: nvml.nvmlDeviceGetMaxClockInfo(card, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, card: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM),
    "max_memory_clock_mhz": lambda nvml, card: nvml.nvmlDeviceGetMaxClockInfo(card, nvml.NVML_CLOCK_MEM),
    "temperature_c": lambda nvml, card: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
    "power_w": lambda nvml, card: nvml.nvmlDeviceGetPowerUsage(card) / 1e3,
    "power_limit_w": lambda nvml, card: nvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1e3,
}


def gpu_state(device: torch.device) -> dict[str, Any]:
    """Return driver, current and maximum clocks, temperature and power by NVML; None where unsupported."""
    answers: dict[str, Any] = dict.fromkeys(_QUESTIONS)
    if (found := power.card(device)) is not None:
        library, card = found
        for name, question in _QUESTIONS.items():
            with contextlib.suppress(library.NVMLError):  # each may be unsupported
                answers[name] = question(library, card)
    return answers


def commit(folder: Path) -> dict[str, Any]:
    """Return commit and dirty flag of the running source tree; None for an installed wheel."""
    if not (folder / ".git").exists():
        return {"commit": None, "dirty": None}
    answers = []
    for arguments in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
        except OSError:  # no git here
            return {"commit": None, "dirty": None}
        answers.append(done.stdout.strip() if done.returncode == 0 else None)
    return {"commit": answers[0], "dirty": None if answers[1] is None else bool(answers[1])}


def host_cpu() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
