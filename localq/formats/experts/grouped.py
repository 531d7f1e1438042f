"""Mixtures of experts for many tokens: all experts of a layer in one product, without waiting for the host.

An entry is a token and one of its experts. `experts_sort` puts those of one expert behind each other, on the device;
`experts_gemm` multiplies every entry by the matrix of its expert, gate and up and their gate in one launch;
`experts_sum` adds the entries of a token. The kernels: csrc/experts/gemm.cu, csrc/experts/entries.cu.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kernels
from localq.formats.experts.kernel import GATES, MOST_EXPERTS
from localq.formats.experts.stacks import (
    Stack,
    arguments,
    check_stack,
    device_of,
    leading,
    shape_of,
    stack_bytes,
)
from localq.formats.table_stack import TableStack
from localq.kernels.checks import HALF_TYPES, TYPES, check, check_cuda, place

TILE = 64  # entries of one expert that a block multiplies at once: csrc/experts/grouped.h


@dataclass(frozen=True)
class Gate:
    """The gate between gate and up; see `experts_gate_up` in `kernel.py`."""

    name: str = "silu"
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class Entries:
    """Entries sorted by expert. Place: the position of an entry in this order.

    count, experts  entries, and experts of the layer
    held            int32, all arrays below in one tensor: addresses are cheaper than tensors
    """

    count: int
    experts: int
    held: Tensor

    @property
    def rows(self) -> Tensor:
        """Token of each place, int32 [count]."""
        return self.held[: self.count]

    @property
    def places(self) -> Tensor:
        """Place of each entry, token by token, int32 [count]."""
        return self.held[self.count : 2 * self.count]

    @property
    def ends(self) -> Tensor:
        """Places up to the end of each expert, int32 [experts]."""
        return self.held[2 * self.count : 2 * self.count + self.experts]

    @property
    def tile_ends(self) -> Tensor:
        """Tiles of at most `TILE` places of one expert, up to the end of each, int32 [experts]."""
        return self.held[2 * self.count + self.experts :]

    def addresses(self) -> dict[str, int]:
        """Of the four, by name."""
        first, of_entries, of_experts = self.held.data_ptr(), 4 * self.count, 4 * self.experts
        ends = first + 2 * of_entries
        return {"rows": first, "places": first + of_entries, "ends": ends, "tile_ends": ends + of_experts}


def experts_sort(chosen: Tensor, experts: int) -> Entries:
    """Entries of tokens with their chosen experts, int64 [tokens, k]; experts at most 513.

    The order of an expert's entries may differ from run to run; results do not. Raises ValueError by name. Bound by the
    latency of one launch of one block.
    """
    op = "experts_sort"
    if not 1 <= experts <= MOST_EXPERTS + 1:
        raise ValueError(f"{op}: experts = {experts}, must be from 1 to {MOST_EXPERTS + 1}")
    count = chosen.numel()
    if chosen.dim() != 2 or not count:
        raise ValueError(f"{op}: chosen has shape {list(chosen.shape)}, must be [tokens, k] and not empty")
    check(op, "chosen", chosen, chosen.device, (torch.int64,), count)
    check_cuda(op, "chosen", chosen)
    entries = Entries(count, experts, torch.empty(2 * (count + experts), dtype=torch.int32, device=chosen.device))
    kernels.module().experts_sort(
        chosen=chosen.data_ptr(),
        count=count,
        active=chosen.shape[1],
        experts=experts,
        **entries.addresses(),
        **place(chosen),
    )
    return entries


class ExpertsGemm:
    """Products of entries with the experts of a stack, which is checked once."""

    def __init__(self, stack: Stack, dtype: torch.dtype) -> None:
        """stack [experts, out, in], dtype of x: float16 or bfloat16. In % 64 == 0 (16 bits: 8), out % 8 == 0.

        Raises ValueError by name; for codebooks and GGUF blocks, which are dequantized first.
        """
        op = "experts_gemm"
        if isinstance(stack, TableStack):
            raise ValueError(f"{op}: the stack is a {type(stack).__name__}, must be of another format")
        if dtype not in HALF_TYPES:
            raise ValueError(f"{op}: x is {dtype}, must be {' or '.join(map(str, HALF_TYPES))}")
        self.device = device_of(stack)
        check_stack(op, stack, dtype, self.device)
        check_cuda(op, "the stack's codes", leading(stack))
        self.dtype, (self.experts, self.rows, self.columns) = dtype, shape_of(stack)
        self._stack, self._arguments = stack, arguments(stack)

    def __call__(
        self, x: Tensor, bias: Tensor | None, entries: Entries, *, gate: Gate | None, out: Tensor, first: int = 0
    ) -> Tensor:
        """out[i] = x W^T + bias of the entry at place i, with W and bias of its expert; through `gate` if there is one.

        x     T [tokens, in] with a gate, else T [entries, in] by place
        bias  T [experts, out] or None
        out   T [entries, out], or [entries, out / 2] with a gate (out % 16 == 0); other experts' rows stay
        The stack holds the layer's experts from number `first` on.

        Sums in f32, rounded once; the result of the gate is rounded again. Raises ValueError by name. Bound: memory up
        to some 32 entries of each expert, then tensor cores.
        """
        op, count, of, halves = "experts_gemm", entries.count, (self.dtype,), 1 if gate is None else 2
        if not 0 <= first <= entries.experts - self.experts:
            raise ValueError(f"{op}: first = {first}, {self.experts} experts must be within {entries.experts}")
        if gate is not None and gate.name not in GATES:
            raise ValueError(f"{op}: gate = {gate.name!r}, must be one of {list(GATES)}")
        if gate is None and x.shape[0] != count:
            raise ValueError(f"{op}: x has {x.shape[0]} rows, must have one for each of {count} entries")
        check(op, "x", x, self.device, of, x.shape[0] * self.columns)
        if bias is not None:
            check(op, "bias", bias, self.device, of, self.experts * self.rows)
        check(op, "out", out, self.device, of, count * self.rows // halves)
        at, how = entries.addresses(), Gate() if gate is None else gate
        kernels.module().experts_gemm(
            x=x.data_ptr(),
            first=first,
            rows=0 if gate is None else at["rows"],
            ends=at["ends"],
            tile_ends=at["tile_ends"],
            all_experts=entries.experts,
            entries=count,
            bias=0 if bias is None else bias.data_ptr(),
            gated=gate is not None,
            gate=GATES[how.name],
            alpha=how.alpha,
            limit=how.limit,
            interleaved=how.interleaved,
            y=out.data_ptr(),
            type=TYPES[self.dtype],
            stack=self._arguments,
            **place(x),
        )
        return out


def experts_gemm(
    x: Tensor, stack: Stack, bias: Tensor | None, entries: Entries, *, gate: Gate | None, out: Tensor, first: int = 0
) -> Tensor:
    """One product with a stack: `ExpertsGemm`."""
    return ExpertsGemm(stack, x.dtype)(x, bias, entries, gate=gate, out=out, first=first)


def experts_sum(x: Tensor, entries: Entries, weights: Tensor, out: Tensor) -> Tensor:
    """out[t] = sum over j of weights[t, j] * x[place of entry (t, j)], in that order, in f32, rounded once.

    x T [entries, width] by place, weights f32 [tokens, k], out T [tokens, width]; T float16 or bfloat16, width a
    multiple of 8. Raises ValueError by name. Bound: memory.
    """
    op, (tokens, active), width = "experts_sum", weights.shape, x.shape[1]
    check(op, "weights", weights, x.device, (torch.float32,), entries.count)
    check(op, "x", x, x.device, HALF_TYPES, entries.count * width)
    check(op, "out", out, x.device, (x.dtype,), tokens * width)
    check_cuda(op, "x", x)
    kernels.module().experts_sum(
        x=x.data_ptr(),
        places=entries.addresses()["places"],
        weights=weights.data_ptr(),
        y=out.data_ptr(),
        type=TYPES[x.dtype],
        tokens=tokens,
        active=active,
        width=width,
        **place(x),
    )
    return out


def experts_gemm_bytes(stack: Stack, entries: int, *, gated: bool, itemsize: int = 2) -> int:
    """Bytes that `experts_gemm` must move if every expert has an entry: the stack, x and the results once."""
    experts, rows, columns = shape_of(stack)
    return stack_bytes(stack, experts) + itemsize * entries * (columns + (rows // 2 if gated else rows))
