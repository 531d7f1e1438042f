"""A command whose stdin is a terminal with lines typed ahead, and whose stdout and stderr are pipes."""

from __future__ import annotations

import os
import pty
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

PROMPT = b">>> "


def run_typed(
    command: Sequence[str], environment: Mapping[str, str], lines: bytes, folder: Path, timeout: float = 120
) -> subprocess.CompletedProcess[bytes]:
    """Its end; stdout is without the prompts."""
    master, slave = pty.openpty()
    try:
        mode = termios.tcgetattr(slave)
        mode[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, mode)
        os.write(master, lines + b"\x04")
        done = subprocess.run(
            list(command), stdin=slave, capture_output=True, cwd=folder, env=dict(environment), check=False,
            timeout=timeout,
        )  # fmt: skip
    finally:
        os.close(master)
        os.close(slave)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.replace(PROMPT, b""), done.stderr)
