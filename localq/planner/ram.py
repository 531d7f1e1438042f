"""RAM for a load on the CPU: its free bytes, and the type that weights have there. Torch-free.

On the CPU every format is dequantized at load, so a parameter takes the bytes of that type.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

CPU_FLAGS = Path("/proc/cpuinfo")
CGROUP = Path("/sys/fs/cgroup")
MULTIPLY_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # of x86-64; of 64-bit Arm
PROCESS_BYTES = 220 * 2**20  # Python with torch; assumed
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@functools.cache
def cpu_dtype() -> str:
    """The type that `--dtype auto` means on the CPU: the engine loads in it, and the planner counts in it.

    bfloat16 if the processor multiplies it, float32 otherwise: without such instructions bfloat16 halves the bytes and
    takes several times as long.
    """
    try:
        flags = CPU_FLAGS.read_text(encoding="ascii", errors="replace").split("\n\n", 1)[0].split()
    except OSError:  # another system than Linux
        return "float32"
    return "bfloat16" if MULTIPLY_BFLOAT16.intersection(flags) else "float32"


@dataclass(frozen=True)
class Ram:
    """Memory for a load on the CPU: bytes that are free, and the type of the weights (a key of `ITEM_BYTES`).

    weights  exact bytes of the dequantized weights without embedding and head, if the files have been read
    process  bytes that the engine process will take; 0 if it runs, since they are not free then
    """

    bytes: int
    dtype: str
    weights: int | None = None
    process: int = PROCESS_BYTES

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return ITEM_BYTES[self.dtype]


def free_ram(dtype: str = "auto") -> Ram:
    """The free RAM of this machine, or of its container, for a load in `dtype`, a value of `--dtype`."""
    import psutil  # type: ignore[import-untyped]  # start-up cost: loads on a GPU do not need it; has no types

    free, allowed = int(psutil.virtual_memory().available), _free_in_container()
    least = free if allowed is None else min(free, allowed)
    return Ram(least, cpu_dtype() if dtype == "auto" else dtype)


def _free_in_container() -> int | None:
    """Bytes below the memory limit of the container (cgroup 2), cached files not counted; None without a limit."""
    try:
        limit, used = ((CGROUP / name).read_text(encoding="ascii") for name in ("memory.max", "memory.current"))
        pairs = (line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        cached = sum(int(size) for name, size in pairs if name in ("active_file", "inactive_file"))
        return max(0, int(limit) - int(used) + cached)
    except (OSError, ValueError):  # no such file; "max" is no limit
        return None
