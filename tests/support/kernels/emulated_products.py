"""Products of matrices in tiles, compiled for the CPU, behind the wrappers of their format."""

from __future__ import annotations

import ctypes
from types import ModuleType, SimpleNamespace

import pytest

from localq import kernels
from tests.support.kernels.gemv_structs import Extras


def install(
    monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL, wrapper: ModuleType, matrix: type[ctypes.Structure], *,
    name: str, stored: str, device: tuple[int, int],
) -> SimpleNamespace:  # fmt: skip
    """`wrapper` runs NAME_gemv and NAME_dequantize of `library` until the test ends.

    matrix    the structure of a matrix, its fields in the order in which `wrapper` gives them
    stored    the argument that says how all matrices of a launch are stored
    device    multiprocessors, shared memory of a block: what products run on that no test gave a device
    Gives `gemv`, which takes the device first, and `dequantize`.
    """

    def launch_gemv(*, x, matrices, y, type, rows, biases, device, stream, **given):
        how, held = given.pop(stored), (matrix * len(matrices))(*(matrix(*each.values()) for each in matrices))
        around = Extras(bias=(ctypes.c_void_p * 3)(*biases), **given)
        getattr(library, f"{name}_gemv_on_cpu")(
            held, len(matrices), how, ctypes.byref(around), ctypes.c_void_p(x), ctypes.c_void_p(y), type, rows, *device
        )

    def launch_dequantize(*, out, type, row_begin, row_count, device, stream, **given):
        getattr(library, f"{name}_dequantize_on_cpu")(
            ctypes.byref(matrix(*given["matrix"].values())), given[stored], ctypes.c_void_p(out), type,
            ctypes.c_int64(row_begin), ctypes.c_int64(row_count),
        )  # fmt: skip

    where = {"device": device, "stream": 0}
    module = SimpleNamespace(**{f"{name}_gemv": launch_gemv, f"{name}_dequantize": launch_dequantize})
    monkeypatch.setattr(kernels, "module", lambda: module)
    monkeypatch.setattr(wrapper, "check_cuda", lambda *given: None)
    monkeypatch.setattr(wrapper, "place", lambda tensor: dict(where))

    def multiply(device, *given, **named):
        where["device"] = device
        return getattr(wrapper, f"{name}_gemv")(*given, **named)

    return SimpleNamespace(gemv=multiply, dequantize=getattr(wrapper, f"{name}_dequantize"))
