"""Mixtures of experts for one token: the router, gate and up of all chosen experts, down of all with their sum.

Three launches are a whole mixture: `router`, `experts_gate_up`, `experts_down`. Which experts were
chosen is read on the device, so that a graph of a step stays the same. An expert that every token goes through is the
last of its stacks, and the router adds it to the chosen ones. All work under CUDA graph capture, allocate
nothing, and give the same bits run after run. What a stack is: `stacks.py`; the kernels: csrc/experts/gemv.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localq import kernels
from localq.formats.codebooks import experts_kernel as codebook_experts
from localq.formats.codebooks.experts_kernel import VqStack
from localq.formats.experts.stacks import (
    Mxfp4Stack,
    Nf4Stack,
    Stack,
    arguments,
    check_expert,
    check_stack,
    device_of,
    leading,
    shape_of,
    stack_bytes,
)
from localq.formats.gguf import experts_kernel as gguf_experts
from localq.formats.gguf.experts_kernel import GgufStack
from localq.formats.mxfp4.kernel import WIDEST, Mxfp4Operand, mxfp4_dequantize
from localq.formats.nf4 import kernel as nf4_kernel
from localq.formats.table_stack import TableStack
from localq.kernels.checks import HALF_TYPES, TYPES, check, check_cuda, place
from localq.kernels.gemv import Norm, norm_arguments

__all__ = [
    "GgufStack",
    "Mxfp4Stack",
    "Nf4Stack",
    "Stack",
    "VqStack",
    "experts_dequantize",
    "experts_down",
    "experts_down_bytes",
    "experts_gate_up",
    "experts_gate_up_bytes",
    "has_room",
    "has_room_for",
    "route",
    "router",
    "router_bytes",
    "router_workspace",
]

# How the chosen experts are weighed: by the softmax over them alone (gpt-oss, mixtral, qwen3_moe with norm_topk_prob),
# or over all experts (qwen3_moe without).
HOW = {"softmax_of_chosen": 0, "softmax_of_all": 1}
GATES = {"silu": 0, "clamped": 1}  # csrc/experts/experts.h, enum Gate: of one token and of many
GELU = "gelu_pytorch_tanh"
GATES_OF_ONE = {**GATES, GELU: 2}  # of one token alone
MOST_EXPERTS, MOST_CHOSEN = 512, 16
ITEM_COLUMNS = 384  # of MXFP4 in shared memory: rows of x go on with zeros to a multiple of them


def route(logits: Tensor, active: int, *, how: str, weights: Tensor, chosen: Tensor) -> None:
    """The `active` largest of `logits` f32 [1, E]: chosen int32 [active], largest first, and weights f32 [active].

    Equal logits: the lower index first. `how`: one of `HOW`. E up to 512, active up to 16. Raises ValueError by name.
    Bound by the latency of one launch of one block.
    """
    op = "route"
    experts = logits.numel()
    _check_choice(op, experts, active, how, weights, chosen, logits.device)
    check(op, "logits", logits, chosen.device, (torch.float32,), experts)
    check_cuda(op, "logits", logits)
    kernels.module().route(
        logits=logits.data_ptr(),
        experts=experts,
        active=active,
        how=HOW[how],
        weights=weights.data_ptr(),
        chosen=chosen.data_ptr(),
        **place(logits),
    )


def router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    active: int,
    *,
    norm: Norm | None,
    how: str,
    weights: Tensor,
    chosen: Tensor,
    workspace: Tensor,
    shared_gate: Tensor | None = None,
) -> None:
    """`route` of the logits norm(x) weight^T + bias, in one launch. x T [1, in], weight T [E, in], bias T [E] or None.

    T float16 or bfloat16, in % 8 == 0; logits are sums in f32, not rounded to T. `workspace`: `router_workspace`, of
    this call alone while it runs; the logits f32 [E] are left in it from its second element on. Bound by latency: reads
    `router_bytes`.
    shared_gate   T [1, in] of a shared expert: weights and chosen have one more element, sigmoid(norm(x) shared_gate^T)
                  with logit and sigmoid rounded to T, and E; active is at most 15 then
    """
    op = "router"
    experts, columns = weight.shape
    _check_choice(op, experts, active, how, weights, chosen, x.device, shared_gate is not None)
    if columns % 8 or not columns:
        raise ValueError(f"{op}: weight has {columns} columns, must be a positive multiple of 8")
    check(op, "x", x, weight.device, HALF_TYPES, columns)
    check(op, "weight", weight, x.device, (x.dtype,), weight.numel())
    if bias is not None:
        check(op, "bias", bias, x.device, (x.dtype,), experts)
    if shared_gate is not None:
        check(op, "shared_gate", shared_gate, x.device, (x.dtype,), columns)
    check(op, "workspace", workspace, x.device, (torch.int32,), experts + 1)
    check_cuda(op, "x", x)
    kernels.module().router(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        type=TYPES[x.dtype],
        in_features=columns,
        workspace=workspace.data_ptr(),
        experts=experts,
        active=active,
        how=HOW[how],
        weights=weights.data_ptr(),
        chosen=chosen.data_ptr(),
        shared_gate=0 if shared_gate is None else shared_gate.data_ptr(),
        **norm_arguments(op, norm, x),
        **place(x),
    )


def router_workspace(experts: int, device: torch.device | str) -> Tensor:
    """Workspace of `router`, int32 [experts + 1]; a launch leaves it ready for the next."""
    return torch.zeros(experts + 1, dtype=torch.int32, device=device)


def router_bytes(experts: int, columns: int, itemsize: int = 2, *, shared: bool = False) -> int:
    """Bytes that `router` must move: its matrix, the gate of a `shared` expert, and x once."""
    return itemsize * (experts + 1 + shared) * columns


def experts_gate_up(
    x: Tensor,
    stack: Stack,
    bias: Tensor | None,
    chosen: Tensor,
    *,
    norm: Norm | None,
    gate: str,
    interleaved: bool,
    out: Tensor,
    alpha: float = 1.702,
    limit: float = 7.0,
    gates: Tensor | None = None,
) -> None:
    """out[j] = gate(g, u) of the halves of norm(x) stack[chosen[j]]^T + bias[chosen[j]], all experts in one launch.

    x T [1, in], stack [E, 2 w, in], bias T [E, 2 w] or None, chosen int32 [k], out T [k, w].
    interleaved   rows 2 i of an expert are gates, 2 i + 1 ups (gpt-oss); else the first w are gates
    gate          "silu": silu(g) * u; "gelu_pytorch_tanh": the same with gelu, by tanh; "clamped": g cut above `limit`,
                  u on both sides, g sigmoid(alpha g) (u + 1)
    gates         f32 [k, w], written over: of a stack in GGUF blocks whose gates and ups are of two types, which takes
                  two launches
    Sums, bias and gate in f32, rounded once. An out-of-range index in `chosen` is clamped.

    Memory-bound: `experts_gate_up_bytes` over the memory bandwidth is the floor.
    """
    op = "experts_gate_up"
    active = _check_operands(op, x, stack, bias, chosen)
    _, rows, columns = shape_of(stack)
    if gate not in GATES_OF_ONE:
        raise ValueError(f"{op}: gate = {gate!r}, must be one of {list(GATES_OF_ONE)}")
    if rows % 2:
        raise ValueError(f"{op}: out = {rows}, must be even: half gates, half ups")
    check(op, "x", x, device_of(stack), HALF_TYPES, columns)
    check(op, "out", out, x.device, (x.dtype,), active * rows // 2)
    if isinstance(stack, TableStack):
        if bias is not None or interleaved or gate not in gates_of(stack):
            known = " or ".join(gates_of(stack))
            raise ValueError(f"{op}: experts in {_kind(stack)} have no bias, and {known} of gates before the ups")
        if isinstance(stack, GgufStack):
            return gguf_experts.gguf_experts_gate_up(x, stack, chosen, norm=norm, out=out, gates=gates, gate=gate)
        return codebook_experts.vq_experts_gate_up(x, stack, chosen, norm=norm, out=out)
    check_cuda(op, "the stack's codes", leading(stack))
    kernels.module().experts_gate_up(
        x=x.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        chosen=chosen.data_ptr(),
        active=active,
        gate=GATES_OF_ONE[gate],
        interleaved=interleaved,
        alpha=alpha,
        limit=limit,
        y=out.data_ptr(),
        type=TYPES[x.dtype],
        **norm_arguments(op, norm, x),
        stack=arguments(stack),
        **place(x),
    )


def experts_down(
    gated: Tensor,
    stack: Stack,
    bias: Tensor | None,
    chosen: Tensor,
    weights: Tensor,
    *,
    residual: Tensor | None,
    out: Tensor,
    behind_gate_up: bool = False,
    signs: Tensor | None = None,
) -> None:
    """out = residual + sum over j of weights[j] (gated[j] stack[chosen[j]]^T + bias[chosen[j]]), in one launch.

    gated T [k, w], stack [E, out, w], bias T [E, out] or None, chosen int32 [k], weights f32 [k], residual and out T
    [1, out], which may be the same. In f32, in the order of `chosen`, rounded once.
    behind_gate_up   the launch before this one on the stream is `experts_gate_up`, and `chosen` was written before
                     that: weights are then loaded while it still runs. Results are wrong otherwise
    signs            u8 [w / 8] of a stack in codebooks: its experts multiply gated[j] rotated (`rotation`)

    Memory-bound: `experts_down_bytes` over the memory bandwidth is the floor.
    """
    op = "experts_down"
    active = _check_operands(op, gated, stack, bias, chosen)
    _, rows, columns = shape_of(stack)
    check(op, "gated", gated, device_of(stack), HALF_TYPES, active * columns)
    check(op, "weights", weights, gated.device, (torch.float32,), active)
    if residual is not None:
        check(op, "residual", residual, gated.device, (gated.dtype,), rows)
    check(op, "out", out, gated.device, (gated.dtype,), rows)
    if isinstance(stack, TableStack) and bias is not None:
        raise ValueError(f"{op}: experts in {_kind(stack)} have no bias")
    if isinstance(stack, VqStack):
        given = (gated, stack, chosen, weights)
        return codebook_experts.vq_experts_down(*given, residual=residual, out=out, signs=signs)
    if signs is not None:
        raise ValueError(f"{op}: signs are of experts in codebooks, and the stack is a {type(stack).__name__}")
    if isinstance(stack, GgufStack):
        return gguf_experts.gguf_experts_down(
            gated, stack, chosen, weights, residual=residual, out=out, behind_gate_up=behind_gate_up
        )
    check_cuda(op, "the stack's codes", leading(stack))
    kernels.module().experts_down(
        x=gated.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        chosen=chosen.data_ptr(),
        active=active,
        weights=weights.data_ptr(),
        residual=0 if residual is None else residual.data_ptr(),
        early=behind_gate_up,
        y=out.data_ptr(),
        type=TYPES[gated.dtype],
        stack=arguments(stack),
        **place(gated),
    )


def gates_of(stack: Stack) -> Sequence[str]:
    """Gates that `experts_gate_up` computes for experts in the format of `stack`."""
    if isinstance(stack, GgufStack):
        return "silu", GELU
    return ("silu",) if isinstance(stack, TableStack) else [*GATES_OF_ONE]


def has_room(stack: Stack, active: int) -> bool:
    """True if `experts_down` of `active` experts fits every card: some keep all their inputs in shared memory."""
    *_, columns = shape_of(stack)
    if isinstance(stack, GgufStack):
        return stack.has_room(active)
    return not isinstance(stack, Mxfp4Stack) or has_room_for(columns, active)


def has_room_for(columns: int, active: int) -> bool:
    """Return the result of the same check by size alone, before the stack exists."""
    padded = -(-columns // ITEM_COLUMNS) * ITEM_COLUMNS
    return active * padded <= WIDEST


def experts_gate_up_bytes(stack: Stack, active: int, itemsize: int = 2) -> int:
    """Bytes that `experts_gate_up` must move: the chosen experts once, x and the result once; biases are left out."""
    _, rows, columns = shape_of(stack)
    return stack_bytes(stack, active) + itemsize * (columns + active * rows // 2)


def experts_down_bytes(stack: Stack, active: int, itemsize: int = 2) -> int:
    """Bytes that `experts_down` must move: the chosen experts once, their inputs and the result once."""
    _, rows, columns = shape_of(stack)
    return stack_bytes(stack, active) + itemsize * (active * columns + rows)


def experts_dequantize(stack: Stack, expert: int, out: Tensor) -> Tensor:
    """The weights of one expert, [out, in] of the dtype of `out` (float16, bfloat16 or float32): for prefill.

    Bit for bit the definition of the format. Raises ValueError by name; for codebooks and GGUF blocks, whose Linears
    have that of their own (`vq_dequantize`, `gguf_dequantize`).
    """
    op = "experts_dequantize"
    if isinstance(stack, TableStack):
        raise ValueError(f"{op}: the stack is of {_kind(stack)}, must be of another format")
    check_expert(op, stack, expert)
    if isinstance(stack, Mxfp4Stack):
        matrix = Mxfp4Operand(stack.blocks[expert].view(stack.out_features, -1), stack.scales[expert])
        return mxfp4_dequantize(matrix, out.dtype, out)
    if isinstance(stack, Nf4Stack):
        rows = (expert * stack.out_features, stack.out_features)
        return nf4_kernel.nf4_dequantize(stack.matrix, out.dtype, out, rows)
    return out.copy_(stack[expert])


def _kind(stack: VqStack | GgufStack) -> str:
    return "codebooks" if isinstance(stack, VqStack) else "GGUF blocks"


def _check_operands(op: str, x: Tensor, stack: Stack, bias: Tensor | None, chosen: Tensor) -> int:
    """Check the operands that both products share, and return the number of chosen experts."""
    check_stack(op, stack, x.dtype, x.device)
    experts, rows, _ = shape_of(stack)
    active = chosen.numel()
    if not 1 <= active <= min(experts, MOST_CHOSEN):
        raise ValueError(f"{op}: {active} experts are chosen, must be 1 to {min(experts, MOST_CHOSEN)}")
    check(op, "chosen", chosen, x.device, (torch.int32,), active)
    if bias is not None:
        check(op, "bias", bias, x.device, (x.dtype,), experts * rows)
    return active


def _check_choice(
    op: str,
    experts: int,
    active: int,
    how: str,
    weights: Tensor,
    chosen: Tensor,
    device: torch.device,
    shared: bool = False,
) -> None:
    if how not in HOW:
        raise ValueError(f"{op}: how = {how!r}, must be one of {list(HOW)}")
    if not 1 <= experts <= MOST_EXPERTS:
        raise ValueError(f"{op}: {experts} experts, must be 1 to {MOST_EXPERTS}")
    if not 1 <= active <= min(experts, MOST_CHOSEN):
        raise ValueError(f"{op}: {active} of {experts} experts, must be 1 to {min(experts, MOST_CHOSEN)}")
    if active + shared > MOST_CHOSEN:
        raise ValueError(f"{op}: {active} experts and a shared one, must be at most {MOST_CHOSEN} together")
    check(op, "weights", weights, device, (torch.float32,), active + shared)
    check(op, "chosen", chosen, device, (torch.int32,), active + shared)
