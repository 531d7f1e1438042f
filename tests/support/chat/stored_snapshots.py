"""Files in the folder of snapshots, and the calls by which an engine writes and reads them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from localq import places
from localq.errors import LocalqError
from localq.stats import Stats

DEATH = LocalqError("engine process", "stopped unexpectedly (signal SIGKILL)")
LONG = Stats("done", prompt_tokens=900, prefilled_tokens=800, prefill_s=4.0, context_used=1000, context_size=2000)


def own_folder(monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    """All that is kept goes below `home`; where snapshots are then."""
    for name in ("LOCALQ_CACHE", "LOCALQ_DATA", "LOCALQ_CONFIG", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(home / name))
    return home / "LOCALQ_CACHE" / "sessions"


def written(path: Path, size: int, age_s: float) -> Path:
    """A file that was used so many seconds ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    used_s = time.time() - age_s
    os.utime(path, (used_s, used_s))
    return path


def names() -> set[str]:
    """Of all snapshots."""
    return set(os.listdir(places.snapshots_dir()))


class Engine:
    """The calls that reach the engine, by the number of the conversation."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.alive = True
        self.error: LocalqError | None = None
        self.dies = False

    def save_cache(self, path: str) -> int:
        return self._called("save", path)

    def restore_cache(self, path: str) -> int:
        return self._called("restore", path)

    def _called(self, what: str, path: str) -> int:
        self.calls.append((what, Path(path).name.partition("-")[0]))
        if self.error is not None:
            self.alive = not self.dies
            raise self.error
        if what == "save":
            written(Path(path), 10, 0)
        return 10

    def since(self) -> list[tuple[str, str]]:
        calls, self.calls = self.calls, []
        return calls
