"""What the NF4 operations refuse, by the argument's name and value, before anything touches a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localq import kernels
from localq.formats.nf4.kernel import nf4_dequantize, nf4_gemm, nf4_gemv
from localq.kernels import gemv
from tests.support.kernels.nf4_operands import inputs, operands

OUT, IN, ROWS = 12, 192, 3
MATRIX, FLAT = operands((OUT, IN)).matrix, operands((OUT, IN), nested=False).matrix


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape and type, not contiguous."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def dequantize(changed, **arguments):
    return nf4_dequantize(replace(MATRIX, **changed), **{"dtype": torch.float16, **arguments})


def multiply(changed, **arguments):
    return nf4_gemv(**{"x": inputs(ROWS, IN, torch.float16), "operands": [replace(MATRIX, **changed)], **arguments})


def multiply_many(changed, **arguments):
    return nf4_gemm(**{"x": inputs(9, IN, torch.float16), "matrix": replace(MATRIX, **changed), **arguments})


CALLS = {"nf4_dequantize": dequantize, "nf4_gemv": multiply, "nf4_gemm": multiply_many}
SHARED = {
    "codes of another type": ({"codes": MATRIX.codes.to(torch.int32)}, "codes is torch.int32"),
    "too few codes": ({"codes": MATRIX.codes[:-1]}, r"codes has shape \(11, 96\), must have 1152"),
    "codes with gaps": ({"codes": every_second(MATRIX.codes)}, "codes has strides"),
    "absmax of floats": ({"absmax": FLAT.absmax}, "absmax is torch.float32"),
    "absmax of codes, not nested": ({"nested_absmax": None}, "absmax is torch.uint8"),
    "too many absmax": ({"absmax": MATRIX.absmax.repeat(2)}, "absmax has shape"),
    "too many nested absmax": ({"nested_absmax": torch.ones(2)}, r"nested_absmax has shape \(2,\), must have 1 "),
    "nested absmax of halves": ({"nested_absmax": torch.ones(1).half()}, "nested_absmax is torch.float16"),
    "no nested map": ({"nested_map": None}, "nested_map is None"),
    "short nested map": ({"nested_map": torch.ones(255)}, "nested_map has shape"),
    "short code map": ({"code_map": torch.ones(15)}, "code_map has shape"),
    "code map of halves": ({"code_map": torch.ones(16).half()}, "code_map is torch.float16"),
    "code map with gaps": ({"code_map": every_second(torch.ones(16))}, "code_map has strides"),
    "more outputs than codes": ({"out_features": OUT + 1}, "codes has shape"),
    "all on the CPU": ({}, "codes are on cpu, must be on a CUDA device"),
}
DEQUANTIZE = {
    "integers wanted": ({"dtype": torch.int8}, "dtype = torch.int8"),
    "a row before the first": ({"rows": (-1, 2)}, r"rows = \(-1, 2\), must lie within 12"),
    "no rows": ({"rows": (4, 0)}, r"rows = \(4, 0\)"),
    "rows past the end": ({"rows": (4, 9)}, r"rows = \(4, 9\)"),
    "out of another type": ({"out": torch.empty(OUT, IN)}, "out is torch.float32"),
    "out of another size": ({"out": torch.empty(OUT, IN - 64, dtype=torch.float16)}, "out has shape"),
    "out of all rows": ({"out": torch.empty(OUT, IN).half(), "rows": (0, 8)}, r"out has shape \(12, 192\), must have"),
    "out transposed": ({"out": torch.empty(IN, OUT, dtype=torch.float16).T}, "out has strides"),
}
GEMV = {
    "x of floats": ({"x": inputs(ROWS, IN, torch.float32)}, "x is torch.float32"),
    "x of nine rows": ({"x": inputs(9, IN, torch.float16)}, r"x has shape \(9, 192\)"),
    "x without rows": ({"x": inputs(1, IN, torch.float16)[:0]}, r"x has shape \(0, 192\)"),
    "x a vector": ({"x": inputs(1, IN, torch.float16)[0]}, r"x has shape \(192,\)"),
    "x of other columns": ({"x": inputs(ROWS, 128, torch.float16)}, "x has 128 columns, a matrix has 192"),
    "x with gaps": ({"x": every_second(inputs(ROWS, IN, torch.float16))}, "x has strides"),
    "bias of another type": ({"operands": [replace(MATRIX, bias=torch.ones(OUT))]}, "bias is torch.float32"),
    "bias of another size": ({"operands": [replace(MATRIX, bias=torch.ones(IN).half())]}, "bias has shape"),
    "no matrix": ({"operands": []}, "0 matrices, must be 1 to 3"),
    "four matrices": ({"operands": [MATRIX] * 4}, "4 matrices, must be 1 to 3"),
    "residual of another size": ({"residual": torch.ones(OUT).half()}, "residual has shape"),
    "an unknown activation": ({"activation": "relu"}, "activation = 'relu'"),
    "an activation of one matrix": ({"activation": "silu"}, "an activation needs two matrices"),
    "a norm of three rows": ({"norm": gemv.Norm(torch.ones(IN), 1e-5)}, "x has 3 rows, a norm"),
    "out of integers": ({"out": torch.empty(ROWS, OUT, dtype=torch.int16)}, "out is torch.int16"),
    "out of another size": ({"out": torch.empty(1, OUT).half()}, "out has shape"),
}
GEMM = {
    "x of floats": ({"x": inputs(9, IN, torch.float32)}, "x is torch.float32"),
    "x without rows": ({"x": inputs(9, IN, torch.float16)[:0]}, r"x has shape \(0, 192\)"),
    "x a vector": ({"x": inputs(9, IN, torch.float16)[0]}, r"x has shape \(192,\)"),
    "x of other columns": ({"x": inputs(9, 128, torch.float16)}, r"x has (shape \(9, 128\)|128 columns)"),
    "x with gaps": ({"x": every_second(inputs(9, IN, torch.float16))}, "x has strides"),
    "bias of another type": ({"matrix": replace(MATRIX, bias=torch.ones(OUT))}, "bias is torch.float32"),
    "bias of another size": ({"matrix": replace(MATRIX, bias=torch.ones(IN).half())}, "bias has shape"),
    "out of another type": ({"out": torch.empty(9, OUT)}, "out is torch.float32"),
    "out of another size": ({"out": torch.empty(1, OUT).half()}, "out has shape"),
}


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("op", CALLS)
def test_a_matrix_must_fit(op, case):
    changed, message = SHARED[case]
    with pytest.raises(ValueError, match=f"{op}: .*{message}"):
        CALLS[op](changed)


@pytest.mark.parametrize("columns", [0, 96, 100])
@pytest.mark.parametrize("op", CALLS)
def test_blocks_must_not_cross_rows(op, columns):
    x = {} if op == "nf4_dequantize" else {"x": torch.zeros(9 if op == "nf4_gemm" else 1, columns).half()}
    with pytest.raises(ValueError, match=f"{op}: the matrix is .*{columns}.*multiple of 64"):
        CALLS[op]({"in_features": columns}, **x)


@pytest.mark.parametrize(
    ("op", "case"),
    [(op, case) for op, cases in zip(CALLS, (DEQUANTIZE, GEMV, GEMM), strict=True) for case in cases],
)
def test_the_operation_refuses(op, case):
    arguments, message = {"nf4_dequantize": DEQUANTIZE, "nf4_gemv": GEMV, "nf4_gemm": GEMM}[op][case]
    with pytest.raises(ValueError, match=f"{op}: .*{message}"):
        CALLS[op]({}, **arguments)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["absmax", "nested_absmax", "nested_map", "code_map"])
def test_mixed_devices_are_refused(name):
    mixed = replace(operands((OUT, IN), device="cuda").matrix, **{name: getattr(MATRIX, name)})
    with pytest.raises(ValueError, match=f"{name} is on cpu, must be on cuda:0"):
        nf4_dequantize(mixed, torch.float16)


# The launchers check for themselves as well: the module may be called without the wrappers.

POINTERS = ("codes", "absmax", "nested_absmax", "nested_map")
PLACE = {"device": 0, "stream": 0}
LAUNCHER_SHARED = [
    ({"out": 0}, "out = 0, must be positive"),
    ({"in": 100}, "in = 100, must be a positive multiple of 64"),
    ({"codes": 0}, "codes = 0, must not be null"),
    ({"codes": 4104}, "codes = 8, bytes past an aligned address"),
    ({"nested_absmax": 0, "absmax": 4097}, "absmax = 1, bytes past"),
    ({"nested_absmax": 4098}, "nested_absmax = 2, bytes past"),
    ({"nested_map": 0}, "nested_map = 0, must not be null"),
    ({"code_map": 4097}, "code_map = 1, bytes past"),
]
LAUNCHER_PRODUCTS = [
    ({"out": 2**31}, "out = 2147483648, is too large"),
    ({"out": 2**27, "in": 2**12}, "out = 134217728, is too large"),
    ({"in": 2**25}, "in = 33554432, must be at most"),
    ({"x": 4098}, "x = 2, bytes past"),
    ({"y": 4097}, "y = 1, bytes past"),
    ({"type": 2}, "dtype = 2, must be float16 or bfloat16"),
    ({"rows": 0}, "rows = 0, must be from 1 to"),
]
LAUNCHER_GEMV = [
    ({"rows": 9}, "rows = 9, must be from 1 to 8"),
    ({"matrices": []}, "matrices = 0, must be from 1 to 3"),
]
LAUNCHER_DEQUANTIZE = [
    ({"out": 2**32}, "out = 4294967296, must be positive, with out"),
    ({"to": 4104}, "out = 8, bytes past"),
    ({"row_begin": 16}, "row_begin = 16, is not a row"),
    ({"row_begin": -1}, "row_begin = -1, is not a row"),
    ({"row_count": 0}, "row_count = 0, is not within"),
    ({"row_count": 17}, "row_count = 17, is not within"),
    ({"row_begin": 3, "row_count": 13, "tiled": True}, "row_begin = 3, cuts a tile"),
]


@pytest.fixture
def module():
    if not kernels.available():
        pytest.skip(kernels.why_not())
    return kernels.module()


def stored(changes):
    """The matrix as csrc/nf4/bind.cpp takes it, 16 x 64 unless changed, and the changes that are left."""
    given = {**dict.fromkeys((*POINTERS, "code_map"), 4096), "offset": 0.0, "out": 16, "in": 64, "tiled": False}
    given.update({name: value for name, value in changes.items() if name in given})
    rest = {name: value for name, value in changes.items() if name not in given}
    return {**given, "out_features": given["out"], "in_features": given["in"]}, rest


@pytest.mark.parametrize(("changes", "message"), LAUNCHER_SHARED + LAUNCHER_PRODUCTS + LAUNCHER_GEMV, ids=str)
def test_the_gemv_launcher_refuses(module, changes, message):
    matrix, rest = stored(changes)
    around = {"norm": 0, "norm_weight": 0, "eps": 0.0, "residual": 0, "activation": 0, "biases": [0], "y_is_f32": False}
    sizes = {"x": 4096, "matrices": [matrix], "y": 4096, "type": 0, "rows": 1}
    with pytest.raises(ValueError, match=f"nf4_gemv: {message}"):
        module.nf4_gemv(**{**around, **PLACE, **sizes, **rest})


@pytest.mark.parametrize(("changes", "message"), LAUNCHER_SHARED + LAUNCHER_PRODUCTS, ids=str)
def test_the_gemm_launcher_refuses(module, changes, message):
    matrix, rest = stored(changes)
    sizes = {"x": 4096, "matrix": matrix, "bias": 0, "y": 4096, "type": 0, "rows": 9}
    with pytest.raises(ValueError, match=f"nf4_gemm: {message}"):
        module.nf4_gemm(**{**PLACE, **sizes, **rest})


@pytest.mark.parametrize(("changes", "message"), LAUNCHER_SHARED + LAUNCHER_DEQUANTIZE, ids=str)
def test_the_dequantize_launcher_refuses(module, changes, message):
    matrix, rest = stored(changes)
    sizes = {"out": rest.pop("to", 4096), "type": 0, "row_begin": 0, "row_count": 16}
    with pytest.raises(ValueError, match=f"nf4_dequantize: {message}"):
        module.nf4_dequantize(**{"matrix": matrix, **PLACE, **sizes, **rest})
