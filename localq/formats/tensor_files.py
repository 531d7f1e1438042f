"""The data of safetensors files, found by the header that was checked, not by another reading of it.

Tensors are read into memory of their own: a file that is cut, a bad block or a network drive that goes away is then an
error with the file's name. A mapped file costs no copy, but there the same faults are the signal SIGBUS, which ends the
process; only the engine process on a GPU maps, since its client says why it ended.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localq import disk
from localq.errors import bad_file
from localq.files import file_state
from localq.files.json_files import DAMAGED
from localq.files.safetensors_headers import Entry, Header, read_header

# The format's name for a type, and torch's.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
PIECE_BYTES = 2**23  # of a tensor that is converted while it is read


class TensorFile:
    """A file opened for its data; it may be removed while it is open.

    mapped: tensors are views of the mapped file: do not write to them. Raises LocalqError for a file that cannot be
    read (exit 9) or is not the one whose header was checked (exit 8), here and in every read.
    """

    def __init__(self, header: Header, *, mapped: bool = False) -> None:
        self._header, self._path = header, header.path
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise disk.read_error(self._path, error) from error
        self._closed = weakref.finalize(self, os.close, self._descriptor)
        self._check_header()
        self._map = self._mapped() if mapped else None

    def close(self) -> None:
        """Close the file; tensors already read stay valid."""
        self._map = None
        self._closed()

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        entry = self._header.tensors[name]
        if self._map is not None:
            self._check_state()
            return self._view(name, entry)
        data = torch.empty(entry.nbytes, dtype=torch.uint8)
        self._fill(data, entry.begin)
        self._check_state()
        return data.view(DTYPES[entry.dtype]).view(entry.shape)

    def read_as(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor in `dtype`, contiguous, in memory of its own; it never exists whole in another type."""
        entry = self._header.tensors[name]
        stored = DTYPES[entry.dtype]
        if self._map is not None or stored == dtype:
            found = self.read(name)
            is_own = self._map is None
            return found if is_own else found.to(dtype, copy=True, memory_format=torch.contiguous_format)
        values, first = torch.empty(entry.shape, dtype=dtype), 0
        flat, buffer = values.view(-1), torch.empty(min(PIECE_BYTES, entry.nbytes), dtype=torch.uint8)
        while first < flat.numel():
            count = min(flat.numel() - first, len(buffer) // stored.itemsize)
            piece = buffer[: count * stored.itemsize]
            self._fill(piece, entry.begin + first * stored.itemsize)
            flat[first : first + count] = piece.view(stored)
            first += count
        self._check_state()
        return values

    # ---- inside

    def _fill(self, data: Tensor, offset: int) -> None:
        """Read bytes [offset, offset + len(data)) of the file into `data`."""
        left = data.numpy().data
        try:
            while left:
                count = os.preadv(self._descriptor, [left], offset)
                if count == 0:
                    raise file_state.changed(self._path)
                left, offset = left[count:], offset + count
        except OSError as error:
            raise disk.read_error(self._path, error) from error

    def _check_state(self) -> None:
        """Raise LocalqError where the file was written since its header was read."""
        try:
            found = file_state.state_of(os.fstat(self._descriptor))
        except OSError as error:
            raise disk.read_error(self._path, error) from error
        if found != (self._header.size, self._header.mtime_ns):
            raise file_state.changed(self._path)

    def _check_header(self) -> None:
        self._check_state()
        try:
            head = os.pread(self._descriptor, self._header.start, 0)
        except OSError as error:
            raise disk.read_error(self._path, error) from error
        if hashlib.sha256(head).hexdigest() != self._header.digest:
            raise file_state.changed(self._path)

    def _mapped(self) -> Any:
        import safetensors  # loads with the first tensor: a plan or a listing needs the headers only

        try:
            found = safetensors.safe_open(f"/proc/self/fd/{self._descriptor}", framework="pt")  # the file that is open
        except (OSError, safetensors.SafetensorError) as error:
            self._check_header()
            raise bad_file(str(self._path), f"cannot be memory-mapped ({error})", DAMAGED) from error
        self._check_header()
        return found

    def _view(self, name: str, entry: Entry) -> Tensor:
        import safetensors  # as above

        assert self._map is not None
        try:
            tensor: Tensor = self._map.get_tensor(name)
        except safetensors.SafetensorError as error:
            raise file_state.changed(self._path) from error
        if (tensor.dtype, tuple(tensor.shape)) != (DTYPES[entry.dtype], entry.shape):
            raise file_state.changed(self._path)
        return tensor


def read_tensors(path: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a file, or those in `names`, on the CPU. Raises LocalqError (exit 8, or 9)."""
    return dict(each_tensor(read_header(path), names))


def each_tensor(header: Header, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file, or those in `names`, one at a time. Raises LocalqError as `read_tensors` does."""
    if missing := sorted(set(names or ()) - header.tensors.keys()):
        raise bad_file(str(header.path), f"{missing[0]} is missing", DAMAGED)
    file = TensorFile(header)
    try:
        for name in header.tensors if names is None else names:
            yield name, file.read(name)
    finally:
        file.close()
