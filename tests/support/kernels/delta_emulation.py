"""Kernels of gated delta nets compiled for the CPU: their operands as C has them, the library, the wrapper over it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localq import kernels
from localq.engine.selftest.delta_nets import StepCase
from localq.kernels import delta_net
from localq.kernels.delta_net import DeltaWorkspace
from tests.support.kernels.cuda_headers import compile_on_cpu

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
HALF = {torch.float16: 2**-11, torch.bfloat16: 2**-8}  # relative error of a rounding


class Net(ctypes.Structure):
    """`DeltaNet` of csrc/delta/delta.h."""

    _fields_ = (
        *((name, POINTER) for name in ("inputs", "gates", "taps", "rates", "offsets", "norm")),
        *((name, POINTER) for name in ("columns", "matrix", "out")),
        ("eps", FLOAT), ("key_heads", INT), ("shared", INT),
    )  # fmt: skip


class Step(Net):
    """`DeltaStep` of csrc/delta/delta.h."""

    _fields_ = (
        *((name, POINTER) for name in ("x", "x_norm", "write", "decay", "heads", "arrived")),
        ("x_eps", FLOAT), ("x_kind", INT), ("hidden", INT),
    )  # fmt: skip


class Rows(Step):
    """`DeltaRows` of csrc/delta/delta.h."""

    _fields_ = (
        *((name, POINTER) for name in ("drafted_inputs", "drafted_decay", "drafted_beta", "row_rates")),
        ("position", POINTER), ("first_drafted", POINTER), ("drafted", INT), ("rows", INT), ("stride", INT),
    )  # fmt: skip


def library(folder: Path, host: str, *kernels: str, faults: tuple[str, ...]) -> ctypes.CDLL:
    """`kernels` of csrc with `host` of tests/support, whose functions run the operations `faults`."""
    return compile_on_cpu(folder, host, kernels, launch="static_shared_on_cpu.h", faults=faults)


Run = Callable[[dict[str, Any], int], None]


def install(monkeypatch: pytest.MonkeyPatch, **runs: Run) -> None:
    """Let wrappers call `runs` by their names, with their operands and their type."""

    def launch_of(run: Run) -> staticmethod:
        def launch(*, operands: dict[str, int], type: int, device: int, stream: int, **numbers: Any) -> None:
            run({**operands, **numbers}, type)

        return staticmethod(launch)

    launches = {name: launch_of(run) for name, run in runs.items()}
    monkeypatch.setattr(kernels, "module", lambda: type("Module", (), launches))
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
