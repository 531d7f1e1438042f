"""vq_adjoint: what it refuses; against fp64, the kernel itself on the CPU, and on a GPU, where sums have one order."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localq.formats.codebooks.adjoint_kernel import SHARES, vq_adjoint, vq_adjoint_bytes
from tests.support.kernels.adjoint_operands import exact, operands
from tests.support.kernels.guarded_memory import guarded
from tests.support.kernels.refusals import refused_by_name

MATRIX, CODES = torch.zeros(3, 48), torch.zeros(3, 12, dtype=torch.uint8)
REFUSED = {
    "codes of another type": ({"codes": CODES.int()}, "codes is torch.int32"),
    "codes that are no matrix": ({"codes": CODES.flatten()}, r"codes has shape \(36,\), must have 0"),
    "codes that are cut": ({"codes": torch.zeros(3, 24, dtype=torch.uint8)[:, :12]}, "codes has strides"),
    "a matrix in 16 bit": ({"matrix": MATRIX.half()}, "matrix is torch.float16"),
    "a matrix of other columns": ({"matrix": MATRIX[:, :40].contiguous()}, "must have 144 elements"),
    "all on the CPU": ({}, "codes are on cpu, must be on a CUDA device"),
}
SHAPES = {  # rows, columns, stride, length
    "vq2": (577, 576, 4, 16),
    "AQLM's books": (33, 1088, 8, 8),
    "as long as it may be": (7, 320, 16, 32),
    "no power of two": (130, 66, 2, 10),
    "one weight a position": (19, 37, 1, 1),
    "rows shorter than a codeword": (5, 8, 4, 16),
    "one row": (1, 4096, 4, 16),
    "more rows than shares": (SHARES + 45, 96, 4, 16),
}

test_it_refuses_by_name = refused_by_name(
    vq_adjoint, {"matrix": MATRIX, "codes": CODES, "stride": 4, "length": 16}, REFUSED
)


def test_bytes():
    assert vq_adjoint_bytes(3, 48, 4) == 4 * 3 * 48 + 3 * 12


class Adjoint(ctypes.Structure):
    """csrc/search/adjoint_kernel.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("matrix", "codes", "sums")),
        *((name, ctypes.c_uint32) for name in ("rows", "columns", "positions", "stride", "length", "width")),
    )


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory) -> Callable[..., Tensor]:
    """The kernel itself, compiled for the CPU, as `vq_adjoint` calls it; `shares` of the rows. All that is read and
    written ends where memory ends."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    out, root = tmp_path_factory.mktemp("library") / "adjoint.so", Path(__file__).parents[3]
    command = [compiler, "-std=c++17", "-O2", "-Wno-unknown-pragmas", "-shared", "-fPIC", "-I", root / "csrc"]
    subprocess.run([*command, "-o", out, root / "tests/support/kernels/vq_adjoint_on_cpu.cpp"], check=True)
    library = ctypes.CDLL(str(out))

    def run(matrix: Tensor, codes: Tensor, stride: int, length: int, shares: int) -> Tensor:
        matrix, codes, sums = guarded(matrix), guarded(codes), guarded(torch.full((shares, 256, length), torch.nan))
        width = 1 << (length - 1).bit_length()
        pointers = (matrix.data_ptr(), codes.data_ptr(), sums.data_ptr())
        given = Adjoint(*pointers, *matrix.shape, codes.shape[1], stride, length, width)
        library.adjoint_on_cpu(ctypes.byref(given), ctypes.c_uint32(shares))
        return sums.sum(0)

    return run


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_on_the_cpu_gathers_what_fp64_does(on_cpu, shape):
    matrix, codes, stride, length = operands(*shape)
    wanted, slack = exact(matrix, codes, stride, length)
    for shares in {1, min(len(matrix), 5)}:
        got = on_cpu(matrix, codes, stride, length, shares)
        assert ((got.double() - wanted).abs() <= slack).all()


@pytest.mark.cuda
@pytest.mark.parametrize("length", [0, 33])
def test_codewords_of_no_length_it_knows_are_refused(length):
    with pytest.raises(ValueError, match=f"length = {length}, must be from 1 to 32"):
        vq_adjoint(MATRIX.cuda(), CODES.cuda(), 4, length)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("used", [256, 3], ids=["all codewords", "few codewords"])
def test_it_gathers_what_fp64_does(shape, used):
    matrix, codes, stride, length = operands(*shape, used)
    wanted, slack = exact(matrix, codes, stride, length)
    got = vq_adjoint(matrix.cuda(), codes.cuda(), stride, length)
    assert got.shape == (256, length)
    assert ((got.cpu().double() - wanted).abs() <= slack).all()
    assert torch.equal(got, vq_adjoint(matrix.cuda(), codes.cuda(), stride, length))
