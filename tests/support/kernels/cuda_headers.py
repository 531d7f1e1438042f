"""Kernels that tests compile for the CPU: where the headers of CUDA are, and the library."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STAND_INS = Path(__file__).parent
MACHINE = {  # of csrc, and what of tests/support stands in for it
    "lookup/intrinsics.cuh": "vq_machine_on_cpu.cuh",
    "attention/intrinsics.cuh": "attention_machine_on_cpu.cuh",
    "bcq/intrinsics.cuh": "bcq_machine_on_cpu.cuh",
    "delta/intrinsics.cuh": "delta_machine_on_cpu.cuh",
    "gather/intrinsics.cuh": "gather_machine_on_cpu.cuh",
    "common/async_copies.cuh": "async_copies_on_cpu.cuh",
    "scaled/intrinsics.cuh": "scaled_machine_on_cpu.cuh",
    "nf4/intrinsics.cuh": "nf4_machine_on_cpu.cuh",
    "common/exchange.cuh": "exchange_machine_on_cpu.cuh",
    "common/block_loads.cuh": "block_machine_on_cpu.cuh",
    "common/mma.cuh": "mma_machine_on_cpu.cuh",
    "common/row_loads.cuh": "row_machine_on_cpu.cuh",
    "common/shared_memory.cuh": "mma_machine_on_cpu.cuh",
}


def cuda_headers() -> Path | None:
    """Where cuda_fp16.h is: beside nvcc, in pip's package, at the usual place."""
    nvcc = shutil.which("nvcc")
    packages = Path(sysconfig.get_paths()["purelib"])
    places = [Path(nvcc).resolve().parents[1]] if nvcc else []
    own = Path(sys.prefix) / "nvcc/nvidia/cu13"  # from pip, by `make`
    places += [packages / "nvidia/cu13", own, Path("/usr/local/cuda")]
    return next((place / "include" for place in places if (place / "include/cuda_fp16.h").exists()), None)


def compile_on_cpu(
    folder: Path, host: str, kernels: Sequence[str], *, launch: str = "launch_on_cpu.h", faults: Sequence[str] = ()
) -> ctypes.CDLL:
    """`kernels`, with `host` of tests/support that calls them, over vq_machine_on_cpu.cuh; skips without a compiler.

    folder    csrc is copied to it, but for what stands in for the machine
    launch    stands in for common/launch.h; empty: `kernels` do not use it
    faults    NAME of functions NAME_on_cpu of `host` that return what went wrong, or null; here they raise ValueError
    An index outside an array of fixed size ends the test: on a GPU it reads on, and may never end.
    """
    compiler, headers = shutil.which("g++"), cuda_headers()
    if compiler is None or headers is None:
        pytest.skip("there is no g++, or no header of CUDA")
    if launch:
        copy_to(folder / "common/launch.h", STAND_INS / launch)
    else:
        (folder / "common").mkdir()
        (folder / "common/launch.h").write_text('#include "lookup/intrinsics.cuh"\n')
    copy_machine(folder)
    for source in (ROOT / "csrc").glob("*/*.*"):
        place = folder / source.relative_to(ROOT / "csrc")
        if not place.exists():
            copy_to(place, source)
    # -O2 takes seconds more than it saves.
    command = [compiler, "-std=c++17", "-O1", "-w", "-fPIC", "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error"]
    command += ["-I", compiled_machine(folder.parent / "machine", command, headers), "-I", folder, "-I", headers]
    command += ["-I", STAND_INS, "-include", "lookup/intrinsics.cuh", "-shared", "-o", folder / "vq.so"]
    command += [STAND_INS / host, folder / "common/require.cpp"]
    command += ["-x", "c++", *(folder / kernel for kernel in kernels)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "vq.so"))
    for name in faults:
        function = getattr(library, f"{name}_on_cpu")
        function.restype, function.errcheck = ctypes.c_char_p, _raise_fault
    return library


def _raise_fault(fault: bytes | None, function: object, arguments: object) -> None:
    if fault is not None:
        raise ValueError(fault.decode())


def copy_to(place: Path, source: Path) -> None:
    """With its times, by which a compiler knows that two copies are one header."""
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, place)


def copy_machine(folder: Path) -> None:
    """What stands in for the machine."""
    for place, name in MACHINE.items():
        copy_to(folder / place, STAND_INS / name)


def compiled_machine(folder: Path, command: Sequence[str], headers: Path) -> Path:
    """A folder with lookup/intrinsics.cuh compiled ahead: a third of each file's time, so once for all libraries."""
    if not folder.exists():
        copy_machine(folder)
        for name in ("check.h", "require.h"):
            copy_to(folder / "common" / name, ROOT / "csrc/common" / name)
        where = ["-I", folder, "-I", headers, "-I", STAND_INS, "-x", "c++-header"]
        header = folder / "lookup/intrinsics.cuh"
        subprocess.run([*command, *where, header, "-o", f"{header}.gch"], check=True)
    return folder
