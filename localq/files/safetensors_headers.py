"""Headers of safetensors files and the index of a sharded checkpoint, checked before use.

A safetensors file is `u64 little-endian header length | header (UTF-8 JSON) | data`. The header maps a tensor name to
{"dtype", "shape", "data_offsets": [begin, end)} with offsets relative to the data; "__metadata__" maps text to text.
Accepted are only known types, shapes whose byte count equals the range, and ranges that cover the data completely
without gap or overlap, as every writer of the format produces. Torch-free.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from localq import disk
from localq.errors import bad_file
from localq.files.extra_tensors import is_of_tower
from localq.files.json_files import DAMAGED, inside, parse_object, read_object

MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 60_000  # per file; a 5 GB shard of a 128-expert NF4 model has about 30,000
# Limits of characters for MAX_TENSORS tensors. Counted before the JSON is parsed, to bound its time and memory.
MAX_CHARACTERS = {b":": 5 * MAX_TENSORS, b",": 8 * MAX_TENSORS, b"[": 2 * MAX_TENSORS + 1, b"{": MAX_TENSORS + 2}
MAX_INDEX_BYTES = 32 * 2**20
MAX_DIMENSIONS = 8
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,126}\.safetensors")

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: safetensors type, shape, and bytes [begin, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A checked header: the tensors in the order of their data, and the file's metadata.

    start            offset of the data; digest: sha256 of the bytes before
    size, mtime_ns   of the file, when the header was read
    """

    path: Path
    tensors: dict[str, Entry]
    metadata: dict[str, str]
    start: int
    digest: str
    size: int
    mtime_ns: int


def read_header(path: Path) -> Header:
    """The header of a safetensors file. Raises LocalqError (exit 8) for an invalid file."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            size, prefix = found.st_size, file.read(8)
            text, start = _header_text(prefix, size, file.read, path)
    except OSError as error:
        raise disk.read_error(path, error) from error
    fields = parse_object(text, f"{path} (header)")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken_error(path, "the metadata is not a map of strings to strings")
    entries = sorted(
        ((name, _entry(path, name, raw, start, size)) for name, raw in fields.items()),
        key=lambda pair: (pair[1].begin, pair[1].end),
    )
    _check_cover(path, entries, start, size)
    digest = hashlib.sha256(prefix + text.encode()).hexdigest()
    return Header(path, dict(entries), metadata, start, digest, size, found.st_mtime_ns)


def _header_text(prefix: bytes, size: int, read: Any, path: Path) -> tuple[str, int]:
    """The JSON text and the offset at which the data begins."""
    if len(prefix) < 8:
        raise _broken_error(path, f"the file is only {size} bytes long")
    (length,) = struct.unpack("<Q", prefix)
    if length > size - 8:
        raise _broken_error(
            path, f"the header claims to be {length:,} bytes long, but the file has only {size:,} bytes"
        )
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise _broken_error(
            path, f"the header claims to be {length:,} bytes long; 2 to {MAX_HEADER_BYTES:,} are allowed"
        )
    raw: bytes = read(length)
    if len(raw) != length:
        raise _broken_error(path, "the file ends inside its header")
    if raw[:1] != b"{":
        raise _broken_error(path, "the header does not start with '{'")
    if any(raw.count(character) > most for character, most in MAX_CHARACTERS.items()):
        raise _broken_error(path, f"the header describes too many tensors (limit: {MAX_TENSORS:,})")
    try:
        return raw.decode("utf-8"), 8 + length
    except UnicodeDecodeError as error:
        raise _broken_error(path, f"the header is not valid UTF-8 (at byte {error.start})") from error


def _entry(path: Path, name: str, raw: Any, start: int, size: int) -> Entry:
    if not isinstance(raw, dict):
        raise _broken_error(path, f"the entry for tensor {name[:80]!r} is not an object")
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _broken_error(path, f"tensor {name[:80]!r} has unknown type {str(dtype)[:20]!r}")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise _broken_error(path, f"tensor {name[:80]!r} has an invalid shape")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _broken_error(path, f"tensor {name[:80]!r} has invalid offsets")
    begin, end = offsets
    nbytes = DTYPE_BYTES[dtype]
    for dimension in shape:
        nbytes *= dimension  # Python integers do not overflow; at most 8 factors below 2^63
    if begin > end or end > size - start:
        raise _broken_error(path, f"tensor {name[:80]!r} lies outside the file (bytes {begin:,} to {end:,})")
    if end - begin != nbytes:
        raise _broken_error(path, f"tensor {name[:80]!r} needs {nbytes:,} bytes but has {end - begin:,}")
    return Entry(dtype, tuple(shape), start + begin, start + end)


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    """A list of integers from 0 to 2^63 - 1 (bool is not an integer here)."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_cover(path: Path, entries: list[tuple[str, Entry]], start: int, size: int) -> None:
    """Check that the entries, in the order of their data, cover [start, size) exactly."""
    position = start
    for name, entry in entries:
        if entry.begin != position:
            fault = "overlaps the tensor before it" if entry.begin < position else "is preceded by a gap"
            raise _broken_error(path, f"tensor {name[:80]!r} {fault}")
        position = entry.end
    if position != size:
        raise _broken_error(path, f"the last {size - position:,} bytes do not belong to any tensor")


def _broken_error(path: Path, why: str) -> Exception:
    return bad_file(str(path), f"not a valid safetensors file: {why}", DAMAGED)


# ---- files of a checkpoint


def shard_paths(folder: Path) -> dict[str, Path]:
    """Shard name -> file, for the checkpoint in `folder`: `model.safetensors`, or the shards of the index.

    Empty if the folder has neither. Raises LocalqError for a bad index, a missing shard, or a link out of the folder.
    """
    single = inside(folder, SINGLE_NAME)
    if single is not None:
        return {SINGLE_NAME: single}
    shards = {}
    for name in sorted(set(read_index(folder).values())):
        path = inside(folder, name)
        if path is None:
            raise bad_file(str(folder), f"{INDEX_NAME} lists {name}, which is missing", "Download the model again.")
        shards[name] = path
    return shards


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard name from the index of `folder`, but for shards of towers alone; empty without an index.

    Such shards are neither fetched nor read: they hold nothing of the text model. Shard names contain no path.
    """
    everything = _weight_map(folder)
    needed = {shard for tensor, shard in everything.items() if not is_of_tower(tensor)}
    return {tensor: shard for tensor, shard in everything.items() if shard in needed or not needed}


def unread_tensors(folder: Path) -> list[str]:
    """The tensors that the index of `folder` names and `read_index` leaves out."""
    return [*(_weight_map(folder).keys() - read_index(folder).keys())]


def _weight_map(folder: Path) -> dict[str, str]:
    path = inside(folder, INDEX_NAME)
    if path is None:
        return {}
    weight_map = read_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad_file(str(path), "weight_map is missing or lists no tensors", DAMAGED)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not SHARD_NAME.fullmatch(shard):
            raise bad_file(str(path), f"tensor {tensor[:80]!r} has invalid shard name {str(shard)[:80]!r}", DAMAGED)
    return weight_map
