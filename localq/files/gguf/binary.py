"""The GGUF container (versions 2 and 3): metadata and tensor directory, every size bounded.

Layout, little-endian: magic "GGUF", u32 version, u64 tensors, u64 keys; keys as string, u32 type, value; tensors as
string, u32 dimensions, u64 dimension sizes (fastest first), u32 type, u64 offset; then, aligned, the data. A string is
u64 length and bytes, an array u32 type, u64 length and values. Source: ggml, docs/gguf.md.

`gguf.GGUFReader` is not used because it takes seconds for a vocabulary, and a front end reads the file at every start.
Torch-free and numpy-free.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq import disk
from localq.errors import LocalqError, bad_file
from localq.files import file_state

MAX_KEYS, MAX_TENSORS, MAX_STRING, MAX_DIMENSIONS = 2**16, 2**17, 2**24, 4
MAX_VALUES = 2**21  # of all arrays; the largest vocabularies with merges and types have under a million
MAX_TEXT = 2**27  # bytes of all strings
_FIRST_BYTES = 2**24  # read at first; a vocabulary of 150,000 tokens takes 6 MB
_PART_BYTES = 2**18  # read at first of a file without a vocabulary: a directory of 3,000 tensors
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
# ggml's type number -> (values, bytes) of a block; a copy of the `gguf` package's table, which needs numpy to import.
BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    9: (32, 40),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
    40: (64, 36),
    41: (128, 18),
}


@dataclass(frozen=True)
class RawTensor:
    """An entry of the directory: ggml's type number, shape (slowest dimension first), file offset.

    file: its number in `Container.files`.
    """

    type: int
    shape: tuple[int, ...]
    offset: int
    file: int = 0


@dataclass(frozen=True)
class GgufFile:
    """A .gguf file, with its size and time when its header was read."""

    path: Path
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Container:
    """Metadata and tensor directory of a .gguf file, without the data; of a split model, of all its files (`splits`).

    files: the one that was read; of a split model all of them in order, and `values` are those of the first.
    """

    values: dict[str, Any]
    tensors: dict[str, RawTensor]
    files: tuple[GgufFile, ...]

    @property
    def path(self) -> Path:
        """The file that names the model: the only one, or the first."""
        return self.files[0].path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class _MoreError(Exception):
    """The header is longer than the bytes that were read."""


class _ByteReader:
    """A position in the first bytes of a file that moves forward.

    size: bytes of the file. Reading past its end is a LocalqError (exit 8), past the bytes at hand a _MoreError. Read,
    not mapped: a mapped file that is cut ends the process.
    """

    def __init__(self, path: Path, data: bytes, size: int) -> None:
        self.path, self.data, self.size, self.at = path, data, size, 0
        self.values_left, self.text_left = MAX_VALUES, MAX_TEXT

    def damaged(self, why: str) -> LocalqError:
        return bad_file(str(self.path), why, "The file is damaged or truncated; download it again.")

    def _cut_off(self) -> Exception:
        return _MoreError() if len(self.data) < self.size else self.damaged("the GGUF header is truncated")

    def take(self, layout: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from("<" + layout, self.data, self.at)
        except struct.error:
            raise self._cut_off() from None
        self.at += struct.calcsize("<" + layout)
        return values

    def count(self, what: str, limit: int) -> int:
        (value,) = self.take("Q")
        if value > min(limit, self.size - self.at):
            raise self.damaged(f"the GGUF header declares an impossible number of {what}: {value}")
        return int(value)

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """The next strings. A tight loop: half of the time to read a vocabulary is spent here."""
        data, at, end, length_at = self.data, self.at, len(self.data), _LENGTH.unpack_from
        found: list[str] = []
        add = found.append
        for _ in range(count):
            first = at + 8
            if first > end:
                raise self._cut_off()
            (length,) = length_at(data, at)
            at = first + length
            if at > end or length > MAX_STRING:
                if at > self.size or length > MAX_STRING:
                    raise self.damaged(f"the GGUF header declares a string of {length:,} bytes, which is too long")
                raise self._cut_off()
            try:
                add(data[first:at].decode())
            except UnicodeDecodeError:  # tokens may be invalid UTF-8 on their own; keys and names are valid
                add(data[first:at].decode("utf-8", "replace"))
        self.text_left -= at - self.at
        if self.text_left < 0:
            raise self.damaged(f"the GGUF header contains too much text (limit: {MAX_TEXT:,} bytes)")
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            (kind,) = self.take("I")
            length = self.count("array values", self.values_left)
            self.values_left -= length
            return self.strings(length) if kind == _STRING else list(self.take(f"{length}{self.scalar(kind)}"))
        return self.take(self.scalar(kind))[0]

    def scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.damaged(f"the GGUF header contains a value of unknown type {kind}")
        return _SCALARS[kind]


def read_container(path: Path) -> Container:
    """The metadata and tensor directory of `path`. Raises LocalqError (exit 8) for anything malformed.

    The last file is cached while its size and time are unchanged, because configuration, tokenizer and special tokens
    are read in turn. Callers share the result and must not change it.
    """
    try:
        state = file_state.state_of(path.stat())
    except OSError as error:
        raise disk.read_error(path, error) from error
    return _read(path, state)


def read_part(path: Path) -> Container:
    """As `read_container`, for a file without a vocabulary, such as a later part of a split model. Not cached."""
    return _load(path, _PART_BYTES)


@functools.lru_cache(maxsize=1)
def _read(path: Path, _state: file_state.State) -> Container:
    return _load(path, _FIRST_BYTES)


def _load(path: Path, count: int) -> Container:
    """Read `count` bytes at first, and more where the header is longer."""
    try:
        with path.open("rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            while True:
                data = os.pread(file.fileno(), min(count, found.st_size), 0)
                if len(data) < min(count, found.st_size):
                    raise file_state.changed(path)
                try:
                    return _parse(_ByteReader(path, data, found.st_size), found.st_mtime_ns)
                except _MoreError:
                    count *= 4
    except OSError as error:
        raise disk.read_error(path, error) from error


def _parse(cursor: _ByteReader, mtime_ns: int) -> Container:
    magic, version = cursor.take("4sI")
    if magic != b"GGUF":
        raise bad_file(str(cursor.path), "not a GGUF file", "Use a .gguf file or a model folder.")
    if version not in (2, 3):
        swapped = "big-endian GGUF" if version in (2 << 24, 3 << 24) else f"GGUF version {version}"
        raise bad_file(str(cursor.path), f"{swapped} is not supported", "Use a little-endian GGUF version 3 file.")
    tensor_count, key_count = cursor.count("tensors", MAX_TENSORS), cursor.count("keys", MAX_KEYS)
    values: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        if key in values:
            raise cursor.damaged(f"the GGUF header contains {key!r} twice")
        values[key] = cursor.value(cursor.take("I")[0])
    tensors = dict(_directory(cursor, tensor_count))
    if len(tensors) != tensor_count:
        raise cursor.damaged("the GGUF header lists a tensor twice")
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment > 2**20 or alignment & (alignment - 1):
        raise cursor.damaged(f"the GGUF header has an invalid alignment, {alignment!r}")
    start, size = -(-cursor.at // alignment) * alignment, cursor.size
    for name, tensor in tensors.items():
        # An unknown type counts as one byte for 32 values here; `read_tensor` refuses it with its name.
        block, block_bytes = BLOCKS.get(tensor.type, (32, 1))
        if tensor.shape[-1] % block and tensor.type in BLOCKS:
            raise cursor.damaged(
                f"tensor {name!r} has {tensor.shape[-1]} values per row, not a multiple of its block size, {block}"
            )
        if start + tensor.offset + math.prod(tensor.shape) // block * block_bytes > size:
            raise cursor.damaged(f"tensor {name!r} of shape {tensor.shape} extends beyond the end of the file")
    placed = {name: RawTensor(each.type, each.shape, start + each.offset) for name, each in tensors.items()}
    return Container(values, placed, (GgufFile(cursor.path, size, mtime_ns),))


def _directory(cursor: _ByteReader, count: int) -> list[tuple[str, RawTensor]]:
    entries = []
    for _ in range(count):
        name, (dimensions,) = cursor.string(), cursor.take("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise cursor.damaged(f"tensor {name!r} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        shape = tuple(reversed(cursor.take(f"{dimensions}Q")))
        if any(not 0 < each < 2**40 for each in shape):
            raise cursor.damaged(f"tensor {name!r} has invalid shape {shape}")
        kind, offset = cursor.take("IQ")
        entries.append((name, RawTensor(kind, shape, offset)))
    return entries
