"""The real engine process, on a GPU, with a fault on demand: a bad store, or a kernel that does not end in time.

`python gpu_faults.py LIBRARY ORDER STEP_LIMIT_S` serves as `localq.worker.server` does. The file ORDER says what to do
in the replies that follow: "bad_store N" or "hang N" before the step after the Nth, nothing where it is empty.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from localq.engine.reply import Step
from localq.worker import server
from localq.worker.backend import TorchBackend
from localq.worker.messages import Generate

SOURCE = Path(__file__).with_suffix(".cu")


def build(folder: Path) -> Path | None:
    """The library of `gpu_faults.cu`, for the GPU that is here; None where there is no nvcc."""
    nvcc = (
        shutil.which("nvcc")
        or shutil.which("/usr/local/cuda/bin/nvcc")
        or shutil.which(f"{sys.prefix}/nvcc/nvidia/cu13/bin/nvcc")
    )
    if nvcc is None:
        return None
    library = folder / "libgpu_faults.so"
    flags = ("-shared", "-Xcompiler", "-fPIC", "-arch=native")
    subprocess.run([nvcc, *flags, str(SOURCE), "-o", str(library)], check=True, timeout=120)
    return library


class FaultyBackend(TorchBackend):
    """The real engine, which fails as told."""

    def __init__(self, library: str, order: str) -> None:
        super().__init__()
        self._faults, self._order = ctypes.CDLL(library), Path(order)

    def generate(self, request: Generate, cancelled: Callable[[], bool]) -> Iterator[Step]:
        """The steps of the real engine, and a fault between two of them."""
        way, _, after = self._order.read_text().partition(" ")
        for count, step in enumerate(super().generate(request, cancelled)):
            yield step
            if way and count == int(after):
                self._break(way)

    def _break(self, way: str) -> None:
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        status = getattr(self._faults, way)(ctypes.c_void_p(stream))
        assert status == 0, f"{way} was not launched: CUDA error {status}"


if __name__ == "__main__":
    server.main(lambda: FaultyBackend(*sys.argv[1:3]), float(sys.argv[3]))
