"""Stored results of the kernels' self-test on this machine: loads no torch, decides nothing about kernels.

One small JSON file in the cache folder. A result holds for one GPU, driver and build of the compiled module, whichever
of them changes asks for a new test. The file is a memory and no more: one that is missing, damaged or cannot be written
only means that the test runs again. The test itself is `engine.selftest`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq import disk, kernels, places
from localq.errors import LocalqError
from localq.files import json_files

FILE = "selftest.json"
MAX_BYTES = 2**20
MOST = 64  # results kept: builds come and go
SCHEMA = 1


@dataclass(frozen=True)
class Place:
    """The GPU and driver that a result holds for. `driver` is its version, "" where it is unknown."""

    gpu: str
    uuid: str
    capability: tuple[int, int]
    driver: str

    def key(self) -> str:
        """Hex name of this place together with the compiled module."""
        parts = (self.uuid or self.gpu, "{}.{}".format(*self.capability), self.driver, build_hash())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class SelftestResult:
    """Outcome of the self-test; `failed` names the kernel that gives wrong results, "" when all passed."""

    gpu: str
    driver: str
    failed: str = ""


@functools.cache
def build_hash() -> str:
    """Hex sha256 of the compiled module; "" where there is none."""
    if not kernels.available():
        return ""
    return disk.sha256_of(Path(str(kernels.module().__file__)))


def path() -> Path:
    """The file."""
    return places.cache_dir() / FILE


def recall(place: Place) -> SelftestResult | None:
    """The result for `place` and the module that is installed; None where there is none. Raises nothing."""
    with contextlib.suppress(LocalqError):  # damaged: as if it were not there
        return _verdict(_read().get(place.key()))
    return None


def remember(place: Place, verdict: SelftestResult) -> str:
    """Store a result, atomically. Returns "" or a line that says why it could not be stored."""
    file = path()
    try:
        known = _read()
    except LocalqError:  # damaged: start with an empty file
        known = {}
    known.pop(place.key(), None)
    kept = dict(list(known.items())[1 - MOST :]) | {place.key(): _fields(verdict)}
    try:
        _write(file, kept)
    except OSError as error:
        why = error.strerror or str(error)
        return f"the kernel self-test will run on every load because its result cannot be saved in {file} ({why})"
    return ""


def _read() -> dict[str, Any]:
    """Key -> fields. Raises LocalqError where the file is damaged or cannot be read."""
    file = path()
    if not file.exists():
        return {}
    verdicts = json_files.read_object(file, MAX_BYTES).get("verdicts")
    return verdicts if isinstance(verdicts, dict) else {}


def _fields(verdict: SelftestResult) -> dict[str, str]:
    return {"gpu": verdict.gpu, "driver": verdict.driver, "failed": verdict.failed}


def _verdict(fields: Any) -> SelftestResult | None:
    names = ("gpu", "driver", "failed")
    if not isinstance(fields, dict) or not all(isinstance(fields.get(name), str) for name in names):
        return None
    return SelftestResult(*(fields[name] for name in names))


def _write(file: Path, verdicts: dict[str, Any]) -> None:
    text = json.dumps({"schema": SCHEMA, "verdicts": verdicts})
    with disk.replacement(file, mode=0o600) as part:
        part.write(text.encode())
