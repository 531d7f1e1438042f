"""The compiled kernels: whether they are there, and if not, why. Each family of operations is a file here.

The compiled module has a host part, which runs on the CPU (`host_module`), and CUDA kernels (`module`), which an
installation may lack. Importing this package loads nothing; the compiled module is loaded at the first question. It
links the CUDA runtime statically and loads without a GPU. `engine.load.device` checks whether a GPU can use it.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class BuildInfo:
    """Build targets of the compiled module: compute capabilities such as "90", and the compiler's CUDA version."""

    architectures: tuple[str, ...]
    cuda_version: str


@functools.cache
def _loaded() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("localq._C"), ""
    except ModuleNotFoundError as error:
        if error.name != "localq._C":
            return None, f"the compiled module cannot be loaded ({error})"
        return None, "localq was installed without its compiled module"
    except ImportError as error:
        return None, f"the compiled module cannot be loaded ({error})"


def available() -> bool:
    """True when the CUDA kernels are built and load."""
    return not why_not()


def why_not() -> str:
    """Return why the CUDA kernels are not available; empty if they are."""
    found, reason = _loaded()
    if found is None or found.build_architectures:
        return reason
    why = "LOCALQ_NO_CUDA=1 was set, or `make chat` was run without an NVIDIA driver"
    return f"localq was built without CUDA kernels ({why})"


def module() -> ModuleType:
    """The compiled module with CUDA kernels. Raises ImportError with the reason."""
    found, _ = _loaded()
    if found is None or not available():
        raise ImportError(why_not())
    return found


def host_available() -> bool:
    """True when the compiled operations that run on the CPU load, with or without CUDA kernels."""
    return _loaded()[0] is not None


def host_why_not() -> str:
    """Return why the operations that run on the CPU are not available; empty if they are."""
    return _loaded()[1]


def host_module() -> ModuleType:
    """The compiled module for operations that run on the CPU. Raises ImportError with the reason."""
    found, reason = _loaded()
    if found is None:
        raise ImportError(reason)
    return found


def build_info() -> BuildInfo | None:
    """Return the build targets of the kernels; None if there are no kernels."""
    found, _ = _loaded()
    if found is None or not available():
        return None
    return BuildInfo(tuple(str(found.build_architectures).split()), str(found.build_cuda_version))


def covers(capability: tuple[int, int]) -> bool:
    """Return whether a GPU of this compute capability can run the kernels: machine code of its generation, or PTX.

    Machine code runs on the same major version with an equal or higher minor; the newest architecture is also there as
    PTX, which the driver compiles for anything later.
    """
    info = build_info()
    if info is None:
        return False
    built = [(int(each[:-1]), int(each[-1])) for each in info.architectures]
    return any(major == capability[0] and minor <= capability[1] for major, minor in built) or capability >= max(built)


def why_not_on(capability: tuple[int, int]) -> str:
    """Return why the kernels cannot run on a GPU of this compute capability; empty if they can."""
    info = build_info()
    if info is None or covers(capability):
        return why_not()
    built = ", ".join(f"sm_{each}" for each in info.architectures)
    return f"they were built for {built}, but this GPU is sm_{capability[0]}{capability[1]}"
