"""Structures of csrc/ that emulated products take, for ctypes."""

from __future__ import annotations

import ctypes


class Extras(ctypes.Structure):
    """csrc/common/gemv.h, GemvExtras."""

    _fields_ = (
        ("norm", ctypes.c_int), ("norm_weight", ctypes.c_void_p), ("eps", ctypes.c_float),
        ("residual", ctypes.c_void_p), ("activation", ctypes.c_int), ("bias", ctypes.c_void_p * 3),
        ("y_is_f32", ctypes.c_bool),
    )  # fmt: skip


class Workspace(ctypes.Structure):
    """csrc/common/workspace.h."""

    _fields_ = (("meeting", ctypes.c_void_p), ("words", ctypes.c_int64))


class Book(ctypes.Structure):
    """csrc/lookup/gemv.h, VqBook."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "fragments")),
        *((name, ctypes.c_int64) for name in ("stride", "steps", "before", "tile_positions")),
    )


class Matrix(ctypes.Structure):
    """VqMatrix there."""

    _fields_ = (
        ("book", Book * 2), ("books", ctypes.c_int), ("scales", ctypes.c_void_p), ("scales_bf16", ctypes.c_bool),
        ("factor", ctypes.c_float), ("out", ctypes.c_int64), ("columns", ctypes.c_int64),
    )  # fmt: skip


def matrix_of(arguments) -> Matrix:
    """A matrix as `formats.codebooks.lookup_kernel` hands it over."""
    books, scales, bf16, factor, out, columns = arguments.values()
    held = (Book * 2)(*(Book(*book.values()) for book in books))
    return Matrix(held, len(books), scales, bf16, factor, out, columns)
