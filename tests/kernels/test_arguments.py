"""What the operations refuse, by the argument's name and value, before anything touches a device."""

from __future__ import annotations

import pytest
import torch
from nf4_operands import inputs, operands

from localq import kernels
from localq.kernels import ops

OUT, IN, ROWS = 12, 192, 3


def dequantize(**changes):
    arguments = {**operands((OUT, IN)).arguments, "shape": (OUT, IN), "dtype": torch.float16, **changes}
    return ops.nf4_dequantize(**arguments)


def gemv(**changes):
    arguments = {"x": inputs(ROWS, IN, torch.float16), **operands((OUT, IN)).arguments, "out_features": OUT, **changes}
    return ops.nf4_gemv(**arguments)


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape and type, not contiguous."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


WEIGHTS = operands((OUT, IN)).arguments
FLAT = operands((OUT, IN), nested=False).arguments
SHARED = {
    "codes of another type": ({"codes": WEIGHTS["codes"].to(torch.int32)}, "codes is torch.int32"),
    "too few codes": ({"codes": WEIGHTS["codes"][:-1]}, r"codes has shape \(11, 96\), must have 1152"),
    "codes with gaps": ({"codes": every_second(WEIGHTS["codes"])}, "codes has strides"),
    "absmax of floats": ({"absmax": FLAT["absmax"]}, "absmax is torch.float32"),
    "absmax of codes, not nested": ({"nested_absmax": None}, "absmax is torch.uint8"),
    "too many absmax": ({"absmax": WEIGHTS["absmax"].repeat(2)}, "absmax has shape"),
    "too many nested absmax": ({"nested_absmax": torch.ones(2)}, r"nested_absmax has shape \(2,\), must have 1 "),
    "nested absmax of halves": ({"nested_absmax": torch.ones(1).half()}, "nested_absmax is torch.float16"),
    "no nested map": ({"nested_map": None}, "nested_map is None"),
    "short nested map": ({"nested_map": torch.ones(255)}, "nested_map has shape"),
    "short code map": ({"code_map": torch.ones(15)}, "code_map has shape"),
    "code map of halves": ({"code_map": torch.ones(16).half()}, "code_map is torch.float16"),
    "code map with gaps": ({"code_map": every_second(torch.ones(16))}, "code_map has strides"),
    "all on the CPU": ({}, "codes are on cpu, must be on a CUDA device"),
}
DEQUANTIZE = {
    "integers wanted": ({"dtype": torch.int8}, "dtype = torch.int8"),
    "blocks across rows": ({"shape": (1, 100)}, "100 weights"),
    "nothing": ({"shape": (0, IN)}, "0 weights"),
    "out of another type": ({"out": torch.empty(OUT, IN)}, "out is torch.float32"),
    "out of another size": ({"out": torch.empty(OUT, IN - 64, dtype=torch.float16)}, "out has shape"),
    "out transposed": ({"out": torch.empty(IN, OUT, dtype=torch.float16).T}, "out has strides"),
}
GEMV = {
    "x of floats": ({"x": inputs(ROWS, IN, torch.float32)}, "x is torch.float32"),
    "x of nine rows": ({"x": inputs(9, IN, torch.float16)}, r"x has shape \(9, 192\)"),
    "x without rows": ({"x": inputs(1, IN, torch.float16)[:0]}, r"x has shape \(0, 192\)"),
    "x a vector": ({"x": inputs(1, IN, torch.float16)[0]}, r"x has shape \(192,\)"),
    "x of half blocks": ({"x": inputs(ROWS, 96, torch.float16)}, "x has 96 columns"),
    "x of other columns": ({"x": inputs(ROWS, 128, torch.float16)}, "codes has shape"),
    "x with gaps": ({"x": every_second(inputs(ROWS, IN, torch.float16))}, "x has strides"),
    "other outputs": ({"out_features": OUT + 1}, "codes has shape"),
    "bias of another type": ({"bias": torch.ones(OUT)}, "bias is torch.float32"),
    "bias of another size": ({"bias": torch.ones(IN).half()}, "bias has shape"),
    "out of another type": ({"out": torch.empty(ROWS, OUT)}, "out is torch.float32"),
    "out of another size": ({"out": torch.empty(1, OUT).half()}, "out has shape"),
}


@pytest.mark.parametrize("case", SHARED | DEQUANTIZE)
def test_dequantize_refuses(case):
    changes, message = (SHARED | DEQUANTIZE)[case]
    with pytest.raises(ValueError, match=f"nf4_dequantize: .*{message}"):
        dequantize(**changes)


@pytest.mark.parametrize("case", SHARED | GEMV)
def test_gemv_refuses(case):
    changes, message = (SHARED | GEMV)[case]
    with pytest.raises(ValueError, match=f"nf4_gemv: .*{message}"):
        gemv(**changes)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["absmax", "nested_absmax", "nested_map", "code_map"])
def test_mixed_devices_are_refused(name):
    arguments = {**operands((OUT, IN), device="cuda").arguments, name: WEIGHTS[name]}
    with pytest.raises(ValueError, match=f"{name} is on cpu, must be on cuda:0"):
        ops.nf4_dequantize(**arguments, shape=(OUT, IN), dtype=torch.float16)


# The launchers check for themselves as well: the module may be called without `ops`.

POINTERS = {"codes": 4096, "absmax": 4096, "nested_absmax": 4096, "nested_map": 4096, "code_map": 4096}
PLACE = {"offset": 0.0, "device": 0, "stream": 0}
LAUNCHER_GEMV = [
    ({"rows": 0}, "rows = 0, must be from 1 to 8"),
    ({"rows": 9}, "rows = 9, must be from 1 to 8"),
    ({"out": 0}, "out = 0, must be positive"),
    ({"out": 2**31}, "out = 2147483648, is too large"),
    ({"out": 2**27, "in": 2**12}, "out = 134217728, is too large"),
    ({"in": 100}, "in = 100, must be a positive multiple of 64"),
    ({"in": 2**25}, "in = 33554432, must be at most"),
    ({"codes": 0}, "codes = 0, must not be null"),
    ({"codes": 4104}, "codes = 8, bytes past an aligned address"),
    ({"nested_absmax": 0, "absmax": 4097}, "absmax = 1, bytes past"),
    ({"nested_absmax": 4098}, "nested_absmax = 2, bytes past"),
    ({"nested_map": 0}, "nested_map = 0, must not be null"),
    ({"code_map": 4097}, "code_map = 1, bytes past"),
    ({"x": 4098}, "x = 2, bytes past"),
    ({"y": 4097}, "y = 1, bytes past"),
    ({"type": 2}, "dtype = 2, must be float16 or bfloat16"),
]
LAUNCHER_DEQUANTIZE = [
    ({"n": 0}, "n = 0, must be a positive multiple of 64"),
    ({"n": 96}, "n = 96, must be a positive multiple of 64"),
    ({"n": -64}, "n = -64, must be a positive multiple of 64"),
    ({"codes": 4100}, "codes = 4, bytes past"),
    ({"out": 4104}, "out = 8, bytes past"),
]


@pytest.fixture
def module():
    if not kernels.available():
        pytest.skip(kernels.why_not())
    return kernels.module()


@pytest.mark.parametrize(("changes", "message"), LAUNCHER_GEMV, ids=lambda each: str(each))
def test_the_gemv_launcher_refuses(module, changes, message):
    sizes = {"x": 4096, "bias": 0, "y": 4096, "type": 0, "rows": 1, "out": 16, "in": 64}
    with pytest.raises(ValueError, match=f"nf4_gemv: {message}"):
        module.nf4_gemv(**{**POINTERS, **PLACE, **sizes, **changes})


@pytest.mark.parametrize(("changes", "message"), LAUNCHER_DEQUANTIZE, ids=lambda each: str(each))
def test_the_dequantize_launcher_refuses(module, changes, message):
    sizes = {"out": 4096, "type": 0, "n": 64}
    with pytest.raises(ValueError, match=f"nf4_dequantize: {message}"):
        module.nf4_dequantize(**{**POINTERS, **PLACE, **sizes, **changes})
