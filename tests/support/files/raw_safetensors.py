"""Safetensors files put together byte by byte, so that tests can make ones that no library would write."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def write_raw(path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> Path:
    """Header length (`length` overrides it), header, data."""
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    """One tensor of a header; the defaults are sound for 24 bytes of data."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}
