"""Tokens through a gated delta net on the GPU, one, some or many: checks of tensors, then the kernels (csrc/delta)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localq import kernels
from localq.files import delta_memory
from localq.kernels.checks import HALF_TYPES, TYPES, addresses, check, check_cuda, place
from localq.kernels.gemv import Norm

DIM = 128  # key_dim and value_dim
TAPS = 4  # of the convolution
MOST_SHARED = 8  # value heads per key head
MOST_ROWS = 8  # tokens of a step

Drafted = tuple[Tensor, Tensor, Tensor]  # T [rows, C], f32 [rows, value_heads] twice: inputs, g and beta


@dataclass(frozen=True)
class DeltaWeights:
    """Weights of a layer besides its matrices: C = (2 * key_heads + value_heads) * 128 channels, of q, k and v.

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
    """Memory through which the blocks of a launch exchange data: allocated once, shared by all layers of a stream.

    Steps of several rows also record the rows before: first_drafted i64 [1], the position of the first drafted row
    that is kept, and accepted i64 [1], the position up to which `delta_replay` replays them.
    """

    def __init__(self, key_heads: int, value_heads: int, device: torch.device, rows: int = 1) -> None:
        """rows: of a launch, at most."""
        self.rows = rows
        self.heads = torch.empty(rows * value_heads * DIM, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(key_heads, dtype=torch.int32, device=device)
        several = rows if rows > 1 else 0
        self.rates = torch.empty(several, 2, value_heads, dtype=torch.float32, device=device)
        self.first_drafted, self.accepted = torch.zeros(2, min(several, 1), dtype=torch.int64, device=device)

    def bytes(self) -> int:
        """Bytes allocated."""
        every = (self.heads, self.arrived, self.rates, self.first_drafted, self.accepted)
        return sum(each.nbytes for each in every)


def why_not(key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int) -> str:
    """Return why the kernel cannot serve a net of this shape; empty if it can."""
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
    x: Tensor,
    norm: Norm,
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
    x, norm   T [1, hidden], what the projections read, before its norm; hidden is a multiple of 8
    write, decay   T [value_heads, hidden]: matrices whose products with norm(x) are b and a
    columns   T [C, 3]: the last inputs, which move on by one
    matrix    f32 [value_heads, 128, 128]: the state, which moves on by one token

    T is float16 or bfloat16. The recurrence, b, a and beta are in f32; q, k, v, o and the norm are rounded to T, as in
    the model. The same bits run after run. Works under CUDA graph capture. Memory-bound: `delta_decode_bytes`.

    `columns` and `matrix` are read while the previous launch may still run: an earlier step must have written them.
    """
    if out is None:
        out = torch.empty_like(gates)
    operands = _checked("delta_decode", 1, inputs, gates, weights, columns, matrix, out)
    operands |= _checked_x("delta_decode", x, norm, write, decay, weights, workspace)
    kernels.module().delta_decode(
        operands=operands, **_step_numbers(x, norm, weights), type=TYPES[inputs.dtype], **place(inputs)
    )
    return out


def delta_verify(
    inputs: Tensor,
    gates: Tensor,
    x: Tensor,
    norm: Norm,
    write: Tensor,
    decay: Tensor,
    weights: DeltaWeights,
    columns: Tensor,
    matrix: Tensor,
    drafted: Drafted,
    position: Tensor,
    workspace: DeltaWorkspace,
    out: Tensor | None = None,
) -> Tensor:
    """As `delta_decode` for N tokens, up to 8, of which all but the first may be rejected -> T [N, value_heads * 128].

    inputs, gates   rows of one stride; x [N, hidden]
    drafted    at least N - 1 rows: of the drafted tokens before, of which the first `position` - `first_drafted` (of
               the workspace) are replayed, and then of this step
    position   i64 [1], of the first token

    `columns` and `matrix` move on by the replayed tokens and the first of this step. Each token is computed as by
    `delta_decode`. Memory-bound: `delta_verify_bytes`.
    """
    op, rows = "delta_verify", inputs.shape[0]
    if out is None:
        out = torch.empty(rows, weights.value_heads * DIM, dtype=gates.dtype, device=gates.device)
    if inputs.stride(0) != gates.stride(0) or gates.shape[0] != rows:
        raise ValueError(f"{op}: inputs and gates have strides {inputs.stride()} and {gates.stride()}, must be alike")
    check(op, "inputs", inputs[0], inputs.device, HALF_TYPES, weights.channels)
    operands = _checked(op, 1, inputs[:1], gates[:1], weights, columns, matrix, out[:1])
    check(op, "out", out, inputs.device, (inputs.dtype,), rows * weights.value_heads * DIM)
    operands |= _checked_x(op, x, norm, write, decay, weights, workspace)
    operands |= _checked_drafted(op, drafted, position, weights, workspace)
    kernels.module().delta_verify(
        operands=operands,
        **_step_numbers(x, norm, weights),
        drafted=drafted[0].shape[0],
        rows=rows,
        stride=inputs.stride(0),
        type=TYPES[inputs.dtype],
        **place(inputs),
    )
    return out


def delta_replay(
    weights: DeltaWeights, columns: Tensor, matrix: Tensor, drafted: Drafted, workspace: DeltaWorkspace
) -> None:
    """Move `columns` and `matrix` on by the `drafted` tokens from `first_drafted` up to `accepted` of the workspace."""
    op, heads, device = "delta_verify", weights.value_heads, matrix.device
    dtype = drafted[0].dtype
    check(op, "columns", columns, device, (dtype,), weights.channels * (TAPS - 1))
    check(op, "matrix", matrix, device, (torch.float32,), heads * DIM * DIM)
    check_cuda(op, "matrix", matrix)
    operands = addresses(
        taps=weights.taps, rates=weights.rates, offsets=weights.offsets, norm=weights.norm, columns=columns,
        matrix=matrix, arrived=workspace.arrived,
    )  # fmt: skip
    operands |= addresses(**dict.fromkeys(("inputs", "gates", "out", "x", "x_norm", "write", "decay", "heads")))
    operands |= _checked_drafted(op, drafted, workspace.accepted, weights, workspace)
    kernels.module().delta_verify(
        operands=operands, eps=weights.eps, x_eps=0.0, x_kind=0, key_heads=weights.key_heads,
        shared=heads // weights.key_heads, hidden=0, drafted=drafted[0].shape[0], rows=0, stride=0, type=TYPES[dtype],
        **place(matrix),
    )  # fmt: skip


def _step_numbers(x: Tensor, norm: Norm, weights: DeltaWeights) -> dict[str, Any]:
    return {
        "eps": weights.eps,
        "x_eps": norm.eps,
        "x_kind": 2 if norm.weight.dtype == torch.float32 else 1,
        "key_heads": weights.key_heads,
        "shared": weights.value_heads // weights.key_heads,
        "hidden": x.shape[-1],
    }


def _checked_x(
    op: str, x: Tensor, norm: Norm, write: Tensor, decay: Tensor, weights: DeltaWeights, workspace: DeltaWorkspace
) -> dict[str, int]:
    """Addresses of what gives b and a of the tokens, and of the workspace, after checks."""
    (rows, hidden), heads, device, dtype = x.shape, weights.value_heads, x.device, x.dtype
    if rows > workspace.rows:
        raise ValueError(f"{op}: x has {rows} rows, but the workspace is for {workspace.rows}")
    check(op, "x", x, weights.taps.device, (weights.taps.dtype,), rows * hidden)
    check(op, "norm weight", norm.weight, device, (dtype, torch.float32), hidden)
    check(op, "write", write, device, (dtype,), heads * hidden)
    check(op, "decay", decay, device, (dtype,), heads * hidden)
    check(op, "workspace", workspace.heads, device, (torch.float32,), workspace.rows * heads * DIM)
    check(op, "workspace", workspace.arrived, device, (torch.int32,), weights.key_heads)
    found = addresses(x=x, x_norm=norm.weight, write=write, decay=decay)
    return found | addresses(heads=workspace.heads, arrived=workspace.arrived)


def _checked_drafted(
    op: str, drafted: Drafted, position: Tensor, weights: DeltaWeights, workspace: DeltaWorkspace
) -> dict[str, int]:
    """Addresses of what is kept of drafted tokens, after checks."""
    (inputs, decay, beta), device = drafted, position.device
    rows, heads = inputs.shape[0], weights.value_heads
    check(op, "drafted inputs", inputs, device, (weights.taps.dtype,), rows * weights.channels)
    check(op, "drafted decay", decay, device, (torch.float32,), rows * heads)
    check(op, "drafted beta", beta, device, (torch.float32,), rows * heads)
    check(op, "position", position, device, (torch.int64,), 1)
    check(op, "workspace", workspace.first_drafted, device, (torch.int64,), 1)
    found = addresses(drafted_inputs=inputs, drafted_decay=decay, drafted_beta=beta, row_rates=workspace.rates)
    return found | addresses(position=position, first_drafted=workspace.first_drafted)


def _checked(
    op: str,
    tokens: int,
    inputs: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    columns: Tensor,
    matrix: Tensor,
    out: Tensor,
) -> dict[str, int]:
    """Addresses of the operands of `tokens` tokens, after checks."""
    device, dtype, heads, channels = inputs.device, inputs.dtype, weights.value_heads, weights.channels
    if reason := why_not(weights.key_heads, heads, matrix.shape[1], matrix.shape[2], weights.taps.shape[1]):
        raise ValueError(f"{op}: {reason}")
    check(op, "inputs", inputs, device, HALF_TYPES, tokens * channels)
    check(op, "gates", gates, device, (dtype,), tokens * heads * DIM)
    check(op, "taps", weights.taps, device, (dtype,), channels * TAPS)
    check(op, "rates", weights.rates, device, (torch.float32,), heads)
    check(op, "offsets", weights.offsets, device, (torch.float32,), heads)
    check(op, "norm", weights.norm, device, (dtype,), DIM)
    check(op, "columns", columns, device, (dtype,), channels * (TAPS - 1))
    check(op, "matrix", matrix, device, (torch.float32,), heads * DIM * DIM)
    check(op, "out", out, device, (dtype,), tokens * heads * DIM)
    check_cuda(op, "inputs", inputs)
    return addresses(
        inputs=inputs, gates=gates, taps=weights.taps, rates=weights.rates, offsets=weights.offsets,
        norm=weights.norm, columns=columns, matrix=matrix, out=out,
    )  # fmt: skip


def delta_decode_bytes(weights: DeltaWeights, hidden: int) -> int:
    """Bytes that must move: the state and the columns read and written, the rows of b and a, and the token's operands.

    Without x and its norm, which the launch before has read.
    """
    state, rows = 2 * 4 * weights.value_heads * DIM * DIM, 2 * 2 * weights.value_heads * hidden
    return state + rows + weights.channels * 2 * (2 * (TAPS - 1) + TAPS + 1) + weights.value_heads * (4 * DIM + 8)


def delta_verify_bytes(weights: DeltaWeights, hidden: int, rows: int) -> int:
    """Bytes that must move: those of `delta_decode`, and of the drafted tokens the operands, and what is kept of them.

    As many drafted tokens are replayed as are kept anew.
    """
    kept = weights.channels * 2 + weights.value_heads * 8
    token = weights.channels * 2 + weights.value_heads * 4 * DIM
    return delta_decode_bytes(weights, hidden) + (rows - 1) * (token + 2 * kept)


def delta_prefill(
    inputs: Tensor,
    gates: Tensor,
    write: Tensor,
    decay: Tensor,
    weights: DeltaWeights,
    columns: Tensor,
    matrix: Tensor,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `delta_decode` for T tokens of known b and a, in chunks of 64 on tensor cores -> [T, value_heads * 128].

    inputs [T, C], gates [T, value_heads * 128], write and decay [T, value_heads]; columns and matrix move on by T.
    workspace   u8 [`delta_memory.kernel_bytes`], or a multiple of a chunk's for other groups of chunks; or None

    Products take operands in two halves of 16 bit where they are not exact in one, and sum in f32, like the state;
    o and what follows are rounded as in the model. The same bits run after run, also if a pass is cut at a multiple of
    64 tokens. Work: `delta_prefill_flops`; bytes: `delta_prefill_bytes`.
    """
    op, tokens, heads = "delta_prefill", inputs.shape[0], weights.value_heads
    if out is None:
        out = torch.empty_like(gates)
    operands = _checked(op, tokens, inputs, gates, weights, columns, matrix, out)
    check(op, "write", write, inputs.device, (inputs.dtype,), tokens * heads)
    check(op, "decay", decay, inputs.device, (inputs.dtype,), tokens * heads)
    operands |= addresses(write=write, decay=decay)
    shared = heads // weights.key_heads
    if workspace is None:
        size = delta_memory.kernel_bytes(tokens, weights.key_heads, shared)
        workspace = torch.empty(size, dtype=torch.uint8, device=inputs.device)
    chunks = workspace.numel() // delta_memory.chunk_bytes(weights.key_heads, shared)
    check(op, "workspace", workspace, inputs.device, (torch.uint8,), workspace.numel())
    kernels.module().delta_prefill(
        operands=operands | addresses(workspace=workspace),
        eps=weights.eps,
        key_heads=weights.key_heads,
        shared=shared,
        tokens=tokens,
        chunks=chunks,
        type=TYPES[inputs.dtype],
        **place(inputs),
    )
    return out


def delta_prefill_bytes(weights: DeltaWeights, tokens: int) -> int:
    """Bytes that must move: operands and results of the tokens, and the state read and written; no workspace."""
    state = 2 * 4 * weights.value_heads * DIM * DIM + weights.channels * 2 * (2 * (TAPS - 1) + TAPS)
    return state + tokens * 2 * (weights.channels + 2 * weights.value_heads * (DIM + 1))


def delta_prefill_flops(weights: DeltaWeights, tokens: int) -> int:
    """Operations of products in chunks of 64, each counted once: 2 k k^T, 2 solutions, 4 with or of the state, 1 score.

    Blocks of 16 x 16 above a diagonal are not counted.
    """
    chunk, lower = delta_memory.CHUNK, 10 * 16 * 16
    of_chunk = 2 * (2 * lower * DIM + 2 * lower * DIM + 3 * chunk * DIM * DIM + lower * DIM)
    return -(-tokens // chunk) * weights.value_heads * of_chunk
