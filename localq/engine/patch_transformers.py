"""localq's NF4 kernels under a transformers model whose Linears are bitsandbytes' `Linear4bit`, without conversion.

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=BitsAndBytesConfig(load_in_4bit=True, ...))
    patch(model)       # up to 8 rows: our matrix-vector product; more: our dequantize, then F.linear
    unpatch(model)     # restores bitsandbytes' forward

The kernels read bitsandbytes' own tensors in place: no weight is copied, moved or written. Only the forward of each
`Linear4bit` is replaced, on the instance. A call that needs gradients keeps bitsandbytes' forward, because the kernels
have no backward. Works with every class that holds `Linear4bit` modules. `patch` imports bitsandbytes, this file does
not.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from localq import kernels
from localq.engine import selftest
from localq.errors import ExitCode, LocalqError, usage_error
from localq.formats.nf4.kernel import BLOCK, NESTED_BLOCK, Nf4Operand, check_matrix, nf4_dequantize, nf4_gemv
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES

_SUBJECT = "patch"


def patch(model: nn.Module) -> int:
    """Run every `Linear4bit` of `model` with localq's kernels; returns how many. Patched ones stay patched.

    Raises LocalqError and leaves the model unchanged: exit 2 where the weights are not NF4 in blocks of 64 on a GPU,
    exit 7 where the kernels cannot run or fail their self-test, which runs at the first use.
    """
    found = _linears(model)
    if not found:
        raise usage_error(
            _SUBJECT, "the model has no Linear4bit layers", "Load it with BitsAndBytesConfig(load_in_4bit=True)."
        )
    forwards = {
        path: _Forward(module, path) for path, module in found.items() if not isinstance(_own_forward(module), _Forward)
    }  # all are built before the first is installed
    for device in {module.get_parameter("weight").device for module in found.values()}:
        for line in selftest.ensure(device):
            warnings.warn(line, stacklevel=2)
    for path, forward in forwards.items():
        found[path].forward = forward
    return len(found)


def unpatch(model: nn.Module) -> int:
    """Restore the forward of every patched `Linear4bit`; returns how many."""
    patched = [module for module in model.modules() if isinstance(_own_forward(module), _Forward)]
    for module in patched:
        del module.forward
    return len(patched)


class _Forward:
    """The forward of one `Linear4bit`, with its operand prepared once.

    x [..., in] is converted to the compute dtype as bitsandbytes does, the result [..., out] back to that of x.
    """

    def __init__(self, module: Any, path: str) -> None:
        if _own_forward(module) is not None:
            raise usage_error(
                _SUBJECT, f"the forward method of {path} has already been replaced", "Remove its hooks first."
            )
        self._module, self._path = module, path
        self._matrix = _matrix(module, path)
        self._stored = module.weight.quant_state.dtype

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's gap; addresses cannot be traced
    def __call__(self, x: Tensor) -> Tensor:
        module = self._module
        bias = module.bias
        if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
            theirs: Tensor = type(module).forward(module, x)
            return theirs
        if not module.compute_type_is_set:
            module.set_compute_type(x)
            module.compute_type_is_set = True
        dtype = module.compute_dtype or x.dtype
        rows = x.to(dtype).reshape(-1, self._matrix.in_features)
        y = self._product(rows.contiguous(), None if bias is None else bias.to(dtype))
        return y.view(*x.shape[:-1], self._matrix.out_features).to(x.dtype)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [rows, in] in the compute dtype; returns [rows, out]."""
        matrix = self._current()
        if 1 <= x.shape[0] <= gemv.ROWS and x.dtype in HALF_TYPES:
            return nf4_gemv(x, [replace(matrix, bias=bias)])
        dense = nf4_dequantize(matrix, self._stored)  # in bitsandbytes' dtype first: the same bits in the product
        return F.linear(x, dense.to(x.dtype), bias)

    def _current(self) -> Nf4Operand:
        """Return the operand, prepared again if the model has moved its weight."""
        if self._module.weight.data_ptr() != self._matrix.codes.data_ptr():
            self._matrix = _matrix(self._module, self._path)
        return self._matrix


def _own_forward(module: nn.Module) -> object:
    """Return the instance's own forward, None where it is the class's."""
    return module.__dict__.get("forward")


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    try:
        kind = importlib.import_module("bitsandbytes.nn").Linear4bit
    except ImportError as error:
        why = f"bitsandbytes cannot be imported ({error})"
        raise LocalqError(_SUBJECT, why, "Install it with `pip install bitsandbytes`.") from error
    return {path: module for path, module in model.named_modules() if isinstance(module, kind)}


def _matrix(module: Any, path: str) -> Nf4Operand:
    """Return the operand over bitsandbytes' tensors; raises LocalqError where the kernels cannot read them."""
    state = getattr(module.weight, "quant_state", None)
    device = module.weight.device
    if device.type != "cuda" or state is None:
        raise usage_error(_SUBJECT, f"{path} is on {device}, not on a CUDA device", "Move the model to the GPU.")
    if reason := kernels.why_not_on(torch.cuda.get_device_capability(device)):
        raise LocalqError(_SUBJECT, reason, "Reinstall localq with nvcc available.", ExitCode.NO_DEVICE)
    if why := why_not_readable(state):
        raise usage_error(_SUBJECT, f"{path}: {why}", "The kernels support only NF4 with a block size of 64.")
    matrix = matrix_of(module.weight.data, state)
    try:
        check_matrix(_SUBJECT, matrix)
    except ValueError as error:
        raise usage_error(_SUBJECT, f"{path} has an unexpected layout: {error}") from error
    return matrix


def why_not_readable(state: Any) -> str:
    """Return why the kernels cannot read a matrix of this `bitsandbytes.functional.QuantState`; "" when they can."""
    if state.quant_type != "nf4":
        return f"the weights are {str(state.quant_type).upper()}, not NF4"
    if state.blocksize != BLOCK:
        return f"the block size is {state.blocksize}"
    if len(state.shape) != 2 or state.shape[1] % BLOCK:
        return f"the shape is {list(state.shape)}, not [out, in] with in % {BLOCK} == 0"
    if state.nested and state.state2.blocksize != NESTED_BLOCK:
        return f"the scales are quantized in blocks of {state.state2.blocksize}; expected {NESTED_BLOCK}"
    return ""


def matrix_of(codes: Tensor, state: Any) -> Nf4Operand:
    """Return an `Nf4Operand` over codes of any storage dtype and their QuantState, in the same memory."""
    nested = state.state2 if state.nested else None
    return Nf4Operand(
        codes=codes.reshape(-1).view(torch.uint8),
        absmax=state.absmax,
        nested_absmax=None if nested is None else nested.absmax,
        nested_map=None if nested is None else nested.code,
        offset=0.0 if nested is None else float(state.offset),
        code_map=state.code,
        out_features=state.shape[0],
        in_features=state.shape[1],
    )
