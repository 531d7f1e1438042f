"""One token through a gated delta net on the GPU: checks of tensors, then the kernel (csrc/delta)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kernels
from localq.kernels.checks import HALF_TYPES, TYPES, addresses, check, check_cuda, place

DIM = 128  # key_dim and value_dim
TAPS = 4  # of the convolution
MOST_SHARED = 8  # value heads per key head


@dataclass(frozen=True)
class DeltaWeights:
    """What a layer has beside its matrices: C = (2 * key_heads + value_heads) * 128 channels, of q, k and v.

    taps      T [C, 4], the token's own last
    rates     f32 [value_heads]: -exp(A_log)
    offsets   f32 [value_heads]: dt_bias
    norm      T [128], of the gated norm; eps
    """

    taps: Tensor
    rates: Tensor
    offsets: Tensor
    norm: Tensor
    eps: float
    key_heads: int

    @property
    def value_heads(self) -> int:
        """Heads of v."""
        return self.rates.shape[0]

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return (2 * self.key_heads + self.value_heads) * DIM


class DeltaWorkspace:
    """What the blocks of one launch exchange: allocated once, shared by all layers of one stream."""

    def __init__(self, key_heads: int, value_heads: int, device: torch.device) -> None:
        self.heads = torch.empty(value_heads * DIM, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(key_heads, dtype=torch.int32, device=device)

    def bytes(self) -> int:
        """Bytes allocated."""
        return self.heads.nbytes + self.arrived.nbytes


def why_not(key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int) -> str:
    """Why the kernel cannot serve a net of this shape; empty when it can."""
    if (key_dim, value_dim) != (DIM, DIM):
        return f"no kernel supports gated delta nets with heads of {key_dim} x {value_dim} (must be {DIM} x {DIM})"
    if kernel != TAPS:
        return f"no kernel supports a convolution over {kernel} tokens in a gated delta net (must be {TAPS})"
    if value_heads % key_heads or value_heads // key_heads > MOST_SHARED:
        heads = f"{value_heads} value heads for {key_heads} key heads"
        return f"no kernel supports gated delta nets with {heads} (at most {MOST_SHARED} per key head)"
    return ""


def delta_decode(
    inputs: Tensor,
    gates: Tensor,
    write: Tensor,
    decay: Tensor,
    weights: DeltaWeights,
    columns: Tensor,
    matrix: Tensor,
    workspace: DeltaWorkspace,
    out: Tensor | None = None,
) -> Tensor:
    """One token: convolution, silu, the delta rule, norm and gate in one launch -> T [1, value_heads * 128].

    inputs    T [1, C]: the token's q, k and v before the convolution
    gates     T [1, value_heads * 128]: z
    write, decay   T [1, value_heads]: b and a
    columns   T [C, 3]: the last inputs, which move on by one
    matrix    f32 [value_heads, 128, 128]: the state, which moves on by one token

    T is float16 or bfloat16. The recurrence is in f32; q, k, v, beta, o and the norm are rounded to T, as in the model.
    The same bits run after run. Works under CUDA graph capture. Memory-bound: `delta_decode_bytes`.
    """
    op, device, dtype = "delta_decode", inputs.device, inputs.dtype
    heads, channels = weights.value_heads, weights.channels
    if reason := why_not(weights.key_heads, heads, matrix.shape[1], matrix.shape[2], weights.taps.shape[1]):
        raise ValueError(f"{op}: {reason}")
    if out is None:
        out = torch.empty(1, heads * DIM, dtype=dtype, device=device)
    check(op, "inputs", inputs, device, HALF_TYPES, channels)
    check(op, "gates", gates, device, (dtype,), heads * DIM)
    check(op, "write", write, device, (dtype,), heads)
    check(op, "decay", decay, device, (dtype,), heads)
    check(op, "taps", weights.taps, device, (dtype,), channels * TAPS)
    check(op, "rates", weights.rates, device, (torch.float32,), heads)
    check(op, "offsets", weights.offsets, device, (torch.float32,), heads)
    check(op, "norm", weights.norm, device, (dtype,), DIM)
    check(op, "columns", columns, device, (dtype,), channels * (TAPS - 1))
    check(op, "matrix", matrix, device, (torch.float32,), heads * DIM * DIM)
    check(op, "workspace", workspace.heads, device, (torch.float32,), heads * DIM)
    check(op, "workspace", workspace.arrived, device, (torch.int32,), weights.key_heads)
    check(op, "out", out, device, (dtype,), heads * DIM)
    check_cuda(op, "inputs", inputs)
    operands = addresses(
        inputs=inputs, gates=gates, write=write, decay=decay, taps=weights.taps, rates=weights.rates,
        offsets=weights.offsets, norm=weights.norm, columns=columns, matrix=matrix, heads=workspace.heads,
        arrived=workspace.arrived, out=out,
    )  # fmt: skip
    kernels.module().delta_decode(
        operands=operands,
        eps=weights.eps,
        key_heads=weights.key_heads,
        shared=heads // weights.key_heads,
        type=TYPES[dtype],
        **place(inputs),
    )
    return out


def delta_decode_bytes(weights: DeltaWeights) -> int:
    """Bytes that must move: the state and the columns read and written, and the operands of the token."""
    state = 2 * 4 * weights.value_heads * DIM * DIM
    return state + weights.channels * 2 * (2 * (TAPS - 1) + TAPS + 1) + weights.value_heads * (4 * DIM + 12)
