"""Which errors of the engine mean that the device is of no use to this process any more. By their names: no torch."""

from __future__ import annotations

_MARKS = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS", "CUDNN_STATUS", "cudaError")
_KINDS = ("AcceleratorError", "CudaError")


def is_device_fault(error: BaseException) -> bool:
    """True for errors after which a CUDA context is unusable (running out of memory is not one of them)."""
    if is_out_of_memory(error):
        return False
    return any(kind.__name__ in _KINDS for kind in type(error).__mro__) or (
        isinstance(error, RuntimeError) and any(mark in str(error) for mark in _MARKS)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """True for torch's own kind, and for what the driver refuses: pinned host memory ends so, and spoils no context."""
    refused = isinstance(error, RuntimeError) and first_line(error).endswith("CUDA error: out of memory")
    return refused or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)


def first_line(error: BaseException) -> str:
    """Of its text; torch's goes on for many."""
    return (str(error).splitlines() or [""])[0]
