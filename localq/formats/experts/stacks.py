"""Stacks of experts as the kernels read them: the matrices [out, in] of a layer's experts behind each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localq.formats.codebooks.experts_kernel import VqStack, check_vq_stack
from localq.formats.gguf.experts_kernel import GgufStack, check_gguf_stack
from localq.formats.nf4 import kernel as nf4_kernel
from localq.formats.nf4.kernel import Nf4Operand
from localq.formats.table_stack import TableStack
from localq.kernels.checks import HALF_TYPES, addresses, check

MXFP4_BLOCK = 32
COLUMNS = 64  # a row of a packed stack is a whole number of them
PLAIN_COLUMNS = 8  # of one in 16 bit: a row is a whole number of 16-byte loads
MXFP4, NF4, PLAIN = 0, 1, 2  # csrc/experts/experts.h, enum ExpertFormat


@dataclass(frozen=True)
class Mxfp4Stack:
    """Experts in MXFP4 (`formats.mxfp4`) as gpt-oss is published; in % 64 == 0. 16-byte aligned.

    blocks  u8 [E, out, in/32, 16]   the even column is the low nibble
    scales  u8 [E, out, in/32]       E8M0
    """

    blocks: Tensor
    scales: Tensor

    @property
    def experts(self) -> int:
        """Matrices."""
        return self.blocks.shape[0]

    @property
    def out_features(self) -> int:
        """Rows of one."""
        return self.blocks.shape[1]

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.blocks.shape[2] * MXFP4_BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.blocks.nbytes + self.scales.nbytes

    def active_bytes(self, active: int) -> int:
        """Bytes that a product with so many experts reads."""
        return self.nbytes // self.experts * active


@dataclass(frozen=True)
class Nf4Stack:
    """Experts in NF4: `matrix` [E * out, in], row by row (not tiled), scales in u8 or f32."""

    matrix: Nf4Operand
    experts: int

    @property
    def out_features(self) -> int:
        """Rows of one."""
        return self.matrix.out_features // self.experts

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.matrix.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, without the two small tables."""
        return nf4_kernel.nf4_weight_bytes(self.matrix.count, self.matrix.nested_absmax is not None)

    def active_bytes(self, active: int) -> int:
        """Bytes that a product with so many experts reads."""
        return self.nbytes // self.experts * active


Stack = Mxfp4Stack | Nf4Stack | VqStack | GgufStack | Tensor  # a Tensor is T [E, out, in], T of x


def shape_of(stack: Stack) -> tuple[int, int, int]:
    """[E, out, in]."""
    if isinstance(stack, Tensor):
        experts, out, columns = stack.shape
        return experts, out, columns
    return stack.experts, stack.out_features, stack.in_features


def stack_bytes(stack: Stack, active: int) -> int:
    """Bytes that a product with so many of its experts reads."""
    if isinstance(stack, Tensor):
        return stack.nbytes // stack.shape[0] * active
    return stack.active_bytes(active)


def device_of(stack: Stack) -> torch.device:
    """Return the device of the stack's codes."""
    return leading(stack).device


def leading(stack: Stack) -> Tensor:
    """Its codes, or the stack itself in 16 bit; of matrices that lie anywhere the table that says where."""
    if isinstance(stack, Tensor):
        return stack
    if isinstance(stack, TableStack):
        return stack.table
    return stack.blocks if isinstance(stack, Mxfp4Stack) else stack.matrix.codes


def check_stack(op: str, stack: Stack, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError, naming the tensor, unless the kernels read it beside x of `dtype` on `device`."""
    if isinstance(stack, VqStack):
        return check_vq_stack(op, stack, dtype, device)
    if isinstance(stack, GgufStack):
        return check_gguf_stack(op, stack, dtype, device)
    if isinstance(stack, Mxfp4Stack):
        shape = tuple(stack.blocks.shape)
        if len(shape) != 4 or shape[3] != MXFP4_BLOCK // 2 or tuple(stack.scales.shape) != shape[:3]:
            found = f"blocks are {list(shape)} and scales {list(stack.scales.shape)}"
            raise ValueError(f"{op}: {found}, must be [E, out, in/32, 16] and [E, out, in/32]")
        check(op, "blocks", stack.blocks, device, (torch.uint8,), stack.blocks.numel())
        check(op, "scales", stack.scales, device, (torch.uint8,), stack.scales.numel())
    elif isinstance(stack, Nf4Stack):
        if stack.experts < 1 or stack.matrix.out_features % stack.experts:
            raise ValueError(f"{op}: {stack.matrix.out_features} rows are not those of {stack.experts} experts")
        if stack.matrix.tiled:
            raise ValueError(f"{op}: the matrix is tiled, a stack must lie row by row")
        nf4_kernel.check_matrix(op, stack.matrix)
        if stack.matrix.codes.device != device:
            raise ValueError(f"{op}: codes are on {stack.matrix.codes.device}, must be on {device}")
    else:
        if stack.dim() != 3:
            raise ValueError(f"{op}: the stack has shape {tuple(stack.shape)}, must be [E, out, in]")
        check(op, "stack", stack, device, (dtype,), stack.numel())
    step = PLAIN_COLUMNS if isinstance(stack, Tensor) else COLUMNS
    experts, out, columns = shape_of(stack)
    if columns % step or not experts * out * columns:
        raise ValueError(f"{op}: the stack is {[experts, out, columns]}, columns must be a positive multiple of {step}")


def arguments(stack: Mxfp4Stack | Nf4Stack | Tensor) -> dict[str, int | float]:
    """The fields that csrc/experts/bind.cpp reads, by name; addresses are 0 where there is none."""
    experts, out, columns = shape_of(stack)
    none = {"nested_absmax": 0, "nested_map": 0, "offset": 0.0, "code_map": 0}
    if isinstance(stack, Tensor):
        held: dict[str, int | float] = {"format": PLAIN, "codes": stack.data_ptr(), "scales": 0, **none}
    elif isinstance(stack, Mxfp4Stack):
        held = {"format": MXFP4, **addresses(codes=stack.blocks, scales=stack.scales), **none}
    else:
        of = nf4_kernel.arguments(stack.matrix)
        held = {"format": NF4, "codes": of["codes"], "scales": of["absmax"], **{name: of[name] for name in none}}
    return {**held, "experts": experts, "out_features": out, "in_features": columns}


def check_expert(op: str, stack: Stack, expert: int) -> None:
    """Raises ValueError unless the stack has it."""
    experts = shape_of(stack)[0]
    if not 0 <= expert < experts:
        raise ValueError(f"{op}: expert = {expert}, must be one of {experts}")


def check_half(op: str, x: Tensor) -> None:
    """x is in 16 bit; raises ValueError."""
    if x.dtype not in HALF_TYPES:
        raise ValueError(f"{op}: x is {x.dtype}, must be {' or '.join(map(str, HALF_TYPES))}")
