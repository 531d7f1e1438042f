"""Build choice for this machine (the host part, kernels for its cards or for all), and the nvcc that builds it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NO = frozenset({"0", "n", "no", "f", "false", "off"})  # LOCALQ_NO_CUDA, as scikit-build-core reads it
OLDEST_NVCC = (12, 8)  # csrc/CMakeLists.txt
HOST, KERNELS, NOTHING = "host", "kernels", "nothing"
_SMI_PLACES = ("/usr/lib/wsl/lib/nvidia-smi",)
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class BuildChoice:
    """A choice of what to compile.

    kind           HOST (operations that run on the CPU), KERNELS (these and CUDA kernels), or NOTHING
    architectures  compute capabilities such as "89"; () = all that csrc/CMakeLists.txt lists
    why            one line for the user
    asked          the user named this kind, so that no other build will do
    """

    kind: str
    architectures: tuple[str, ...] = ()
    why: str = ""
    asked: bool = False

    @property
    def name(self) -> str:
        """Such as "host", "kernels" (all) or "kernels-86-120"; also the name of the build folder."""
        return "-".join((self.kind, *self.architectures))


@dataclass(frozen=True)
class Nvcc:
    """The CUDA compiler that a build will use; path None = none that is new enough, for the reason `why`."""

    path: Path | None
    why: str = ""


def listed_architectures(root: Path) -> tuple[str, ...]:
    """The compute capabilities that a release is built for, from csrc/CMakeLists.txt."""
    text = (root / "csrc/CMakeLists.txt").read_text(encoding="utf-8")
    found = re.search(r"set\(LOCALQ_ARCHITECTURES ([\d ]+) CACHE", text)
    if found is None:
        raise ValueError("csrc/CMakeLists.txt does not set LOCALQ_ARCHITECTURES")
    return tuple(found[1].split())


def build_for_all(no_cuda: str) -> BuildChoice:
    """The build of `make test`. no_cuda: LOCALQ_NO_CUDA, "" = unset."""
    if no_cuda and no_cuda.lower() not in NO:
        return BuildChoice(HOST, why="no CUDA kernels because LOCALQ_NO_CUDA is set", asked=True)
    return BuildChoice(KERNELS, why="CUDA kernels for all supported cards", asked=True)


def build_for_this_machine(no_cuda: str, driver: bool, listed: Sequence[str], smi: str = "") -> BuildChoice:
    """The build of `make chat`.

    no_cuda  LOCALQ_NO_CUDA, "" = unset
    driver   whether there is an NVIDIA driver
    listed   `listed_architectures`
    smi      the nvidia-smi to run, "" = the one on PATH
    """
    if no_cuda:
        return build_for_all(no_cuda)
    if not driver:
        if cxx_compiler(os.environ) is None:
            return BuildChoice(
                NOTHING,
                why="no NVIDIA driver and no C++ compiler (g++), so nothing is compiled and vq2 models cannot be "
                "created",
            )
        return BuildChoice(HOST, why="no CUDA kernels because there is no NVIDIA driver")
    capabilities = compute_capabilities(smi)
    if not capabilities:
        return BuildChoice(KERNELS, why="nvidia-smi lists no GPUs; building CUDA kernels for all supported cards")
    wanted = sorted({each for each in (nearest(one, listed) for one in capabilities) if each}, key=int)
    cards = ", ".join(sorted(set(capabilities), key=float))
    if not wanted:
        return BuildChoice(
            HOST, why=f"no CUDA kernels because compute capability {cards} is too low (8.0 or higher is required)"
        )
    return BuildChoice(
        KERNELS, tuple(wanted), f"CUDA kernels for the cards in this machine (compute capability {cards})"
    )


def compute_capabilities(smi: str = "") -> list[str]:
    """Compute capabilities such as "8.9" of the cards here; [] where nvidia-smi is missing or fails."""
    program = smi or shutil.which("nvidia-smi") or next((each for each in _SMI_PLACES if Path(each).exists()), "")
    if not program:
        return []
    command = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.strip() for line in run.stdout.splitlines()]
    return [line for line in lines if re.fullmatch(r"\d+\.\d", line)] if run.returncode == 0 else []


def nearest(capability: str, listed: Sequence[str]) -> str:
    """The newest of `listed` that is not newer than a card of `capability` ("8.9"); "" for a card older than all.

    A card runs machine code of its major version with an equal or lower minor; a later major runs the PTX that every
    build has of its newest.
    """
    number = int(capability.replace(".", ""))
    return max((each for each in listed if int(each) <= number), key=int, default="")


def find_nvcc(environment: Mapping[str, str], own: Path) -> Nvcc:
    """The nvcc that CMake would take, or `own`, the one from pip, where it is there already; else why there is none."""
    named = environment.get("CUDACXX", "")
    homes = [environment.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [named, *(f"{home}/bin/nvcc" for home in homes if home)]
    places += [shutil.which("nvcc", path=environment.get("PATH", "")) or "", "/usr/local/cuda/bin/nvcc", str(own)]
    found = next((Path(each) for each in places if each and os.access(each, os.X_OK)), None)
    if found is None:
        return Nvcc(None, "nvcc not found")
    version = nvcc_version(found)
    if version < OLDEST_NVCC:
        number = ".".join(map(str, version))
        return Nvcc(None, f"{found} is from CUDA {number}, but 12.8 or newer is required")
    return Nvcc(found)


def nvcc_version(nvcc: Path) -> tuple[int, int]:
    """(major, minor) of the CUDA that `nvcc` belongs to; (0, 0) where it does not say."""
    try:
        run = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return 0, 0
    found = re.search(r"release (\d+)\.(\d+)", run.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def cxx_compiler(environment: Mapping[str, str]) -> str | None:
    """The C++ compiler that CMake would take."""
    names = (environment.get("CXX", ""), "c++", "g++", "clang++")
    return next((found for each in names if each and (found := shutil.which(each.split()[0]))), None)
