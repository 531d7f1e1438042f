"""Headers of CUDA, for kernels that tests compile for the CPU."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path


def cuda_headers() -> Path | None:
    """Where cuda_fp16.h is: beside nvcc, in pip's package, at the usual place."""
    nvcc = shutil.which("nvcc")
    packages = Path(sysconfig.get_paths()["purelib"])
    places = [Path(nvcc).resolve().parents[1]] if nvcc else []
    places += [packages / "nvidia/cu13", Path("/usr/local/cuda")]
    return next((place / "include" for place in places if (place / "include/cuda_fp16.h").exists()), None)
