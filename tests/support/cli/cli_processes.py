"""`localq` as a process of its own, with settings, conversations and caches of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.cli.typed_lines import run_typed

ROOT = Path(__file__).parents[3]
LOCALQ = [sys.executable, "-m", "localq"]
PLACES = ("LOCALQ_CONFIG", "LOCALQ_DATA", "LOCALQ_CACHE", "HF_HUB_CACHE")


def environment_of(folder: Path, model: Path) -> dict[str, str]:
    """Everything is kept below `folder`; `model` is what is opened where none is named, on the CPU."""
    places = {name: str(folder / name.lower()) for name in PLACES}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOCALQ_")}
    return {
        **kept,
        **places,
        "XDG_STATE_HOME": str(folder),
        "LOCALQ_MODEL": str(model),
        "LOCALQ_DEVICE": "cpu",
        "LOCALQ_DTYPE": "float32",
    }


def localq(
    environment: dict[str, str], *arguments: str, stdin: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    """Its end with stdin from a pipe; more: of the environment."""
    return subprocess.run(
        [*LOCALQ, *arguments], input=stdin, capture_output=True, text=True, cwd=ROOT, env={**environment, **more},
        check=False, timeout=120,
    )  # fmt: skip


def localq_typed(environment: dict[str, str], *arguments: str, lines: str) -> subprocess.CompletedProcess[str]:
    """Its end with lines that are typed at a terminal, where commands work."""
    done = run_typed([*LOCALQ, *arguments], environment, lines.encode(), ROOT)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
