"""NVIDIA's management library for the card that is measured: what clocks, power and energy are asked of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def card(device: torch.device) -> tuple[Any, Any] | None:
    """(pynvml, handle of `device`); None on the CPU and where NVML does not answer.

    Leaves NVML initialised, which costs nothing, until the process ends.
    """
    if device.type != "cuda":
        return None
    import pynvml  # type: ignore[import-untyped]  # only benchmarks ask
    import torch  # reports import what asks here, and load none

    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None
