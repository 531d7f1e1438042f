"""Kernels of gated delta nets compiled for the CPU: their operands as C has them, the library, the wrapper over it."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localq import kernels
from localq.engine.selftest.delta_nets import StepCase
from localq.kernels import delta_net
from localq.kernels.delta_net import DeltaWorkspace
from tests.support.kernels.cuda_headers import ROOT, built, copy_to

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
HALF = {torch.float16: 2**-11, torch.bfloat16: 2**-8}  # relative error of a rounding


class Net(ctypes.Structure):
    """`DeltaNet` of csrc/delta/delta.h."""

    _fields_ = (
        *((name, POINTER) for name in ("inputs", "gates", "taps", "rates", "offsets", "norm")),
        *((name, POINTER) for name in ("columns", "matrix", "out")),
        ("eps", FLOAT), ("key_heads", INT), ("shared", INT),
    )  # fmt: skip


def library(folder: Path, host: str, kernel: str) -> ctypes.CDLL:
    """`kernel` of csrc with `host` of tests/support, which calls it."""
    copy_to(folder / "common/launch.h", ROOT / "tests/support/kernels/static_shared_on_cpu.h")
    shutil.copy(ROOT / "tests/support/kernels/launch_on_cpu.h", folder)
    return built(folder, host, [kernel])


def install(monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[[dict[str, Any], int], bytes | None]) -> None:
    """Let the wrapper `name` call `run`, with its operands and its type; what that returns is raised."""

    def launch(*, operands: dict[str, int], type: int, device: int, stream: int, **numbers: Any) -> None:
        if (fault := run({**operands, **numbers}, type)) is not None:
            raise ValueError(fault.decode())

    monkeypatch.setattr(kernels, "module", lambda: type("Module", (), {name: staticmethod(launch)}))
    monkeypatch.setattr(delta_net, "check_cuda", lambda *_: None)
    monkeypatch.setattr(delta_net, "place", lambda _: {"device": 0, "stream": 0})


def assert_token_as_in_fp64(case: StepCase, workspace: DeltaWorkspace, dtype: torch.dtype) -> None:
    """Run the token of `case`, and compare all that changes.

    Three roundings of o, and those of q, k and v, which a sum of f32 may take the other way.
    """
    out, columns, matrix = case.expected()
    found = case.run(workspace)
    torch.testing.assert_close(found.double(), out, rtol=4 * HALF[dtype], atol=4 * HALF[dtype])
    torch.testing.assert_close(case.token.matrix.double(), matrix, rtol=1e-5, atol=4 * HALF[dtype])
    assert torch.equal(case.token.columns, columns)
    assert not workspace.arrived.any()
