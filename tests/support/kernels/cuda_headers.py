"""Kernels that tests compile for the CPU: where the headers of CUDA are, and the library."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def cuda_headers() -> Path | None:
    """Where cuda_fp16.h is: beside nvcc, in pip's package, at the usual place."""
    nvcc = shutil.which("nvcc")
    packages = Path(sysconfig.get_paths()["purelib"])
    places = [Path(nvcc).resolve().parents[1]] if nvcc else []
    places += [packages / "nvidia/cu13", Path("/usr/local/cuda")]
    return next((place / "include" for place in places if (place / "include/cuda_fp16.h").exists()), None)


def built(folder: Path, sources: Sequence[str], host: str, kernels: Sequence[str]) -> ctypes.CDLL:
    """`kernels`, with `host` of tests/support that calls them, over vq_machine_on_cpu.cuh; skips without a compiler.

    folder    an empty one; `sources` of csrc and all its .cuh are copied to it, beside what stands in for the machine.
              A launch.h that is there already stays
    An index outside an array of fixed size ends the test: on a GPU it reads on, and may never end.
    """
    compiler, headers = shutil.which("g++"), cuda_headers()
    if compiler is None or headers is None:
        pytest.skip("there is no g++, or no header of CUDA")
    for source in (*sources, "check.cpp", *(path.name for path in (ROOT / "csrc").glob("*.cuh"))):
        shutil.copy2(ROOT / "csrc" / source, folder)
    copy_machine(folder)
    if not (folder / "launch.h").exists():
        (folder / "launch.h").write_text('#include "vq_machine.cuh"\n')
    # -O2 takes seconds more than it saves.
    command = [compiler, "-std=c++17", "-O1", "-w", "-fPIC", "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error"]
    command += ["-I", compiled_machine(folder.parent / "machine", command, headers), "-I", folder, "-I", headers]
    command += ["-I", ROOT / "tests/support/kernels", "-include", "vq_machine.cuh", "-shared", "-o", folder / "vq.so"]
    command += [ROOT / "tests/support/kernels" / host, "-x", "c++", *(folder / kernel for kernel in kernels)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "vq.so"))


def copy_machine(folder: Path) -> None:
    """What stands in for the machine; with its times, by which a compiler knows that two copies are one header."""
    for machine in (ROOT / "tests/support/kernels").glob("*_machine_on_cpu.cuh"):
        shutil.copy2(machine, folder / machine.name.replace("_on_cpu", ""))


def compiled_machine(folder: Path, command: Sequence[str], headers: Path) -> Path:
    """A folder with vq_machine.cuh compiled ahead: a third of the time of each file, so once for all libraries."""
    if not folder.exists():
        folder.mkdir()
        copy_machine(folder)
        shutil.copy2(ROOT / "csrc/check.h", folder)
        where = ["-I", headers, "-I", ROOT / "tests/support/kernels", "-x", "c++-header", folder / "vq_machine.cuh"]
        subprocess.run([*command, *where, "-o", folder / "vq_machine.cuh.gch"], check=True)
    return folder
