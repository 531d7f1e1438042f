"""Tensors that end where memory ends: who reads or writes behind one of them ends the process."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

PAGE, NO_ACCESS = mmap.PAGESIZE, 0


def guarded(tensor: Tensor) -> Tensor:
    """A copy on the CPU, whose last byte is the last of a page; nobody may touch the next one. Its alignment is that of
    its size, at most a page's."""
    room = PAGE * -(-tensor.nbytes // PAGE)
    memory = mmap.mmap(-1, room + PAGE)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + room
    failed = ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), ctypes.c_size_t(PAGE), NO_ACCESS)
    assert not failed, "the page behind could not be closed"
    place = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=room - tensor.nbytes)
    return place.view(tensor.shape).copy_(tensor)
