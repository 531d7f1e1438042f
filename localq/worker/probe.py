"""Is the GPU still there? Asked in a process of its own, because a driver that has lost its GPU may never answer.

`python -m localq.worker.probe` prints {"lost": WHY} on one line, WHY empty while the driver reaches a GPU. Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence

from localq import driver, gpus
from localq.processes import ending, environment

COMMAND = (sys.executable, "-P", "-m", "localq.worker.probe")
SECONDS = 2.5  # with the end of the engine process, the user knows within 5 s
REAP_S = 0.2


def why_lost(seconds: float = SECONDS, command: Sequence[str] = COMMAND) -> str:
    """Why no GPU can be reached any more; empty while one can. Takes `seconds` at most, and a moment."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a lost device cannot be killed
            process.communicate(timeout=REAP_S)
        return f"its driver does not answer within {seconds:g} s"
    try:
        return str(json.loads(said)["lost"])
    except (ValueError, KeyError, TypeError):
        return f"asking its driver ended with {ending(process.returncode)}"


def look() -> str:
    """As `why_lost`, here and now."""
    found = driver.probe_driver()
    if not found.present:
        return "there is no driver any more"
    if found.why_not:
        return found.why_not
    return next((each for each in gpus.probe().unavailable if "lost" in each.casefold()), "")  # NVML: "GPU is lost"


if __name__ == "__main__":
    print(json.dumps({"lost": look()}))
