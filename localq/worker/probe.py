"""Check for a lost GPU, in a separate process, because a driver that has lost its GPU may never answer.

`python -m localq.worker.probe` prints {"lost": WHY} on one line, WHY empty while the driver reaches a GPU. Torch-free.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence

from localq import driver, gpus
from localq.processes import child_environment, exit_reason

COMMAND = (sys.executable, "-P", "-m", "localq.worker.probe")
SECONDS = 2.5  # together with ending the engine process, the user knows within 5 s
REAP_S = 0.2


def why_lost(seconds: float = SECONDS, command: Sequence[str] = COMMAND) -> str:
    """Return why no GPU is reachable, "" while one is. Takes little more than `seconds` at most."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=child_environment()
    )
    try:
        answer, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for a lost device cannot be killed
            process.communicate(timeout=REAP_S)
        return f"the driver did not respond within {seconds:g} s"
    try:
        return str(json.loads(answer)["lost"])
    except (ValueError, KeyError, TypeError):
        return f"the driver query failed ({exit_reason(process.returncode)})"


def check_here() -> str:
    """`why_lost` in this process."""
    found = driver.probe_driver()
    if not found.present:
        return "the driver is no longer loaded"
    if found.why_not:
        return found.why_not
    return next((each for each in gpus.probe().unavailable if "lost" in each.casefold()), "")  # NVML: "GPU is lost"


if __name__ == "__main__":
    print(json.dumps({"lost": check_here()}))
