"""Structures of csrc/ that emulated products take, for ctypes."""

from __future__ import annotations

import ctypes


class Extras(ctypes.Structure):
    """csrc/gemv.h, GemvExtras."""

    _fields_ = (
        ("norm", ctypes.c_int), ("norm_weight", ctypes.c_void_p), ("eps", ctypes.c_float),
        ("residual", ctypes.c_void_p), ("activation", ctypes.c_int), ("bias", ctypes.c_void_p * 3),
        ("y_is_f32", ctypes.c_bool),
    )  # fmt: skip


class Workspace(ctypes.Structure):
    """csrc/vq_gemv.h, VqWorkspace."""

    _fields_ = (("meeting", ctypes.c_void_p), ("words", ctypes.c_int64))
