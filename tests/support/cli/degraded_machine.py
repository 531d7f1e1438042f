"""Every verb of localq as a process of its own, on a machine that may lack something: its words, its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.files.hostile_models import write_sound

ROOT = Path(__file__).parents[3]
LOCALQ = (sys.executable, "-m", "localq")
QUICK = (
    ("--help",), ("--version",), ("ls",), ("show", "MODEL"), ("verify",), ("fit", "--vram", "24"), ("config", "path"),
    ("help",), ("prune", "--yes"), ("doctor",), ("rm", "nobody/nothing", "-y"), ("pull", "nobody/nothing"), ("tui",),
)  # fmt: skip
ENGINE = (
    ("run", "MODEL", "hi", "--max-tokens", "2"), ("chat", "MODEL", "--plain", "--no-save"),
    ("eval", "MODEL", "--text", "TEXT", "--window", "16", "--max-windows", "1", "--device", "cpu"),
    ("bench", "MODEL", "-p", "4", "-n", "2", "-r", "1", "--against", "none", "--no-baseline", "--device", "cpu"),
    ("quantize", "MODEL", "--format", "nf4", "--out", "OUT", "--force", "--yes"),
)  # fmt: skip
WORKS = {"rm": 4, "pull": 6, "tui": 2}  # exit codes on a sound machine, besides 0


def model_in(folder: Path) -> Path:
    """A small model that is sound, with text.txt beside it, which is `TEXT`."""
    model = write_sound(folder / "sound")
    (folder / "text.txt").write_text("a red boat and a blue boat " * 30)
    return model


def environment_in(folder: Path) -> dict[str, str]:
    """Everything is kept below `folder`, and there is no hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOCALQ_", "HF_", "XDG_"))}
    places = {f"LOCALQ_{name}": str(folder / name) for name in ("CONFIG", "DATA", "CACHE", "MODELS")}
    hub = {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "XDG_STATE_HOME": str(folder / "state")}
    return {**kept, **places, **hub, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCALQ_DEVICE": "cpu"}


def words(verb: tuple[str, ...], model: Path, out: Path) -> list[str]:
    """The arguments of a verb, with the paths that its capitals stand for."""
    meant = {"MODEL": str(model), "TEXT": str(model.parent / "text.txt"), "OUT": str(out)}
    return [meant.get(word, word) for word in verb]


def run(command: list[str], environment: dict[str, str], **options: object) -> subprocess.CompletedProcess[str]:
    """Its end, with "hi" at stdin."""
    given = {"stderr": subprocess.PIPE, "cwd": ROOT, **options}
    return subprocess.run(
        command, env=environment, input="hi\n", stdout=subprocess.PIPE, text=True, timeout=240, check=False, **given
    )
