"""Errors after which the device is unusable in this process, recognized by name, without torch."""

from __future__ import annotations

_MARKS = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS", "CUDNN_STATUS", "cudaError")
_KINDS = ("AcceleratorError", "CudaError")


def is_device_fault(error: BaseException) -> bool:
    """True for errors after which a CUDA context is unusable; not for exhausted memory."""
    if is_out_of_memory(error):
        return False
    return any(kind.__name__ in _KINDS for kind in type(error).__mro__) or (
        isinstance(error, RuntimeError) and any(mark in str(error) for mark in _MARKS)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """True for torch's out-of-memory error, and the driver's (pinned memory), which leaves the context usable."""
    refused = isinstance(error, RuntimeError) and first_line(error).endswith("CUDA error: out of memory")
    return refused or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)


def first_line(error: BaseException) -> str:
    """Return the first line of the error's text; torch writes many."""
    return (str(error).splitlines() or [""])[0]
