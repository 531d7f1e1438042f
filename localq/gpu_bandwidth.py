"""The read bandwidth of the GPU here, for front ends without torch: `python -m localq.bench.bandwidth` measures it."""

from __future__ import annotations

import json
import subprocess
import sys

from localq.worker import spawn

TIMEOUT_S = 60.0  # torch and CUDA start in 3 s, the measurement takes 0.2 s


def measured() -> float | None:
    """Bytes per second of the first visible GPU, by a process of its own; None where that cannot be done."""
    command = [sys.executable, "-P", "-m", "localq.bench.bandwidth"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
            env=spawn.environment(),
        )  # fmt: skip
        found = json.loads(done.stdout)["read_bytes_per_s"] if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):  # no torch, no GPU, or other words
        return None
    return float(found) if isinstance(found, int | float) and found > 0 else None
