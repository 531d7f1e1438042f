"""Measurements of this machine: bandwidth of each GPU, memory of the last loads, time of quantizing.

One small JSON file in the cache folder. If it is missing, damaged or not writable, values are measured again.
Torch-free.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localq import disk, places
from localq.errors import LocalqError
from localq.files import json_files
from localq.kv_bits import KV_BITS, KvBits

FILE = "measured.json"
MAX_BYTES = 2**20
MOST = 200  # entries of a kind; the oldest are dropped
SCHEMA = 1


@dataclass(frozen=True)
class LoadMemory:
    """Memory of a load: component -> bytes, predicted and measured; with its device and options."""

    device: str
    format: str
    ctx: int
    kv_bits: KvBits
    embed: str
    head: str
    predicted: dict[str, int]
    measured: dict[str, int]


def bandwidth(gpu: str) -> float | None:
    """Measured read bandwidth of a GPU (UUID, else name) in bytes per second; None if not measured."""
    found = _section("bandwidth").get(gpu)
    return float(found) if isinstance(found, int | float) and found > 0 else None


def keep_bandwidth(gpu: str, read_bytes_per_s: float) -> None:
    """Save a measured bandwidth. Raises nothing."""
    _keep("bandwidth", gpu, round(read_bytes_per_s))


def last_load(name: str) -> LoadMemory | None:
    """The last load of the model `name` on a GPU; None without one."""
    found = _section("loads").get(name)
    try:
        load = LoadMemory(**(found or {}))
    except TypeError:  # none, or from another version
        return None
    sizes = [*load.predicted.values(), *load.measured.values()] if _are_tables(load) else [None]
    return load if load.kv_bits in KV_BITS and all(isinstance(size, int) for size in sizes) else None


def keep_load(name: str, load: LoadMemory) -> None:
    """Save the memory of a load. Raises nothing."""
    _keep("loads", name, asdict(load))


def quantizing(folder: Path) -> float | None:
    """Seconds of quantizing the model in `folder` here, without interruption; None if unknown."""
    found = _section("quantizing").get(str(folder))
    return float(found) if isinstance(found, int | float) and found > 0 else None


def keep_quantizing(folder: Path, seconds: float) -> None:
    """Save the time of quantizing. Raises nothing."""
    _keep("quantizing", str(folder), round(seconds, 3))


def _are_tables(load: LoadMemory) -> bool:
    return isinstance(load.predicted, dict) and isinstance(load.measured, dict)


def _path() -> Path:
    return places.cache_dir() / FILE


def _section(kind: str) -> dict[str, Any]:
    with contextlib.suppress(LocalqError, OSError):  # damaged: counts as missing
        if _path().exists():
            found = json_files.read_object(_path(), MAX_BYTES).get(kind)
            return found if isinstance(found, dict) else {}
    return {}


def _keep(kind: str, key: str, value: Any) -> None:
    known = {each: _section(each) for each in ("bandwidth", "loads", "quantizing")}
    known[kind].pop(key, None)
    known[kind] = dict(list(known[kind].items())[1 - MOST :]) | {key: value}
    text = json.dumps({"schema": SCHEMA, **known})
    # A full or read-only disk: measured again next time.
    with contextlib.suppress(OSError), disk.replacement(_path(), mode=0o600) as file:
        file.write(text.encode())
