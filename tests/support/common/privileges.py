"""Rights of files that count for root too, for tests of what this user may not read."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

_VERSION_3 = 0x20080522
_READ_ALL = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextlib.contextmanager
def bound_by_rights() -> Iterator[None]:
    """This thread, and those that it starts, without root's right to pass over the mode of files."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION_3, 0), (_Sets * 2)()
    if libc.capget(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capget")
    before = sets[0].effective
    sets[0].effective = before & ~_READ_ALL
    if libc.capset(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capset")
    try:
        yield
    finally:
        sets[0].effective = before
        libc.capset(ctypes.byref(header), sets)


@contextlib.contextmanager
def closed(path: Path) -> Iterator[Path]:
    """`path`, a folder or a file, that nobody may read or enter."""
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        with bound_by_rights():
            yield path
    finally:
        path.chmod(mode)
