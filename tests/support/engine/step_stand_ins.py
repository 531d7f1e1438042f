"""What the kernels of a decode step compute, in torch on any device: lets the fused step run without a GPU.

Everything in the dtype of the operands (float32 in tests), without the kernels' roundings.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.formats import mxfp4, nf4
from localq.formats.codebooks import rotation
from localq.formats.codebooks.experts_kernel import VqStack
from localq.formats.experts.stacks import Nf4Stack
from localq.formats.gguf.experts_kernel import GgufStack
from localq.models.attention import Span, attend
from localq.models.layers import ACTIVATIONS
from localq.models.rope import rotate
from tests.support.kernels import gguf_operands
from tests.support.kernels.vq_operands import weights_of


def normed(x: Tensor, norm: Any) -> Tensor:
    """weight * x / rms(x), or x without a norm."""
    if norm is None:
        return x
    return F.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), norm.eps)


def dense_gemv(x, operands, *, norm=None, residual=None, activation=None, out):
    """`kernels.dense.dense_gemv`."""
    products(x, [each.weight for each in operands], operands, norm, residual, activation, out)


def products(x, weights, operands, norm=None, residual=None, activation=None, out=None):
    """With the biases of `operands`, whose weights [out, in] are `weights`."""
    biases = [each.bias for each in operands]
    parts = [F.linear(normed(x, norm), weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if activation is not None:
        gate, up = parts
        parts = [ACTIVATIONS[activation](gate) * up]
    result = torch.cat(parts, -1)
    out.copy_(result if residual is None else residual + result)


def vq_gemv(x, operands, *, norm=None, **around):
    """`formats.codebooks.lookup_kernel.vq_gemv`."""
    x = normed(x, norm)
    if operands[0].signs is not None:
        x = rotation.rotate(x, operands[0].signs)
    products(x, [weights_of(each) for each in operands], operands, **around)


def attention_decode(
    qkv,
    layer,
    position,
    *,
    heads,
    rotary,
    q_norm,
    k_norm,
    scale,
    softcap,
    window,
    workspace,
    sinks=None,
    base=None,
    q_stride=0,
    gate=None,
    out,
) -> None:
    """`kernels.attention.attention_decode`; layer has k and v [kv_heads, capacity, head_dim]."""
    kv_heads, _, head_dim = layer.k.shape
    if len(qkv) > 1:
        for row in range(len(qkv)):
            one = None if gate is None else gate[row]
            attention_decode(
                qkv[row : row + 1], layer, position + row, heads=heads, rotary=rotary, q_norm=q_norm, k_norm=k_norm,
                scale=scale, softcap=softcap, window=window, workspace=workspace, sinks=sinks, base=base,
                q_stride=q_stride, gate=one, out=out[row : row + 1],
            )  # fmt: skip
        return
    at, behind = int(position), heads * (q_stride or head_dim)
    q = qkv[:, :behind].view(1, heads, -1)[..., :head_dim]
    k, v = qkv[:, behind:].view(1, -1, head_dim).split(kv_heads, 1)
    q, k = normed(q, q_norm), normed(k, k_norm)
    if rotary is not None:
        cos, sin = rotary[at : at + 1, :1], rotary[at : at + 1, 1:]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    at -= 0 if base is None else int(base)
    layer.k[:, at], layer.v[:, at] = k[0], v[0]
    first = max(0, at + 1 - window) if window else 0
    keys, values = layer.k[:, first : at + 1], layer.v[:, first : at + 1]
    attended = attend(q, keys, values, Span(first, at + 1, None, False), scale, softcap, sinks)
    out.copy_(attended if gate is None else attended * torch.sigmoid(gate.reshape(out.shape)))


def delta_decode(inputs, gates, x, norm, write, decay, weights, columns, matrix, workspace, out) -> None:
    """`kernels.delta_net.delta_decode`, for heads of any width."""
    beta, kept = _rates(x, norm, write, decay, weights)
    out.copy_(_delta_token(inputs, gates, kept[0], beta[0], weights, columns, matrix))


def delta_verify(
    inputs, gates, x, norm, write, decay, weights, columns, matrix, drafted, position, workspace, out
) -> None:
    """`kernels.delta_net.delta_verify`."""
    _replay(int(position) - int(workspace.first_drafted), weights, columns, matrix, drafted)
    beta, kept = _rates(x, norm, write, decay, weights)
    state = columns, matrix
    for row in range(len(x)):
        token = slice(row, row + 1)
        out[token] = _delta_token(inputs[token], gates[token], kept[row], beta[row], weights, *state)
        if row == 0:
            state = columns.clone(), matrix.clone()
        else:
            for part, given in zip(drafted, (inputs[row], kept[row], beta[row]), strict=True):
                part[row - 1] = given


def delta_replay(weights, columns, matrix, drafted, workspace) -> None:
    """`kernels.delta_net.delta_replay`."""
    _replay(int(workspace.accepted) - int(workspace.first_drafted), weights, columns, matrix, drafted)


def _replay(count, weights, columns, matrix, drafted) -> None:
    for row in range(max(0, min(count, len(drafted[0])))):
        inputs, kept, beta = (part[row] for part in drafted)
        gates = torch.zeros(1, matrix.shape[0] * matrix.shape[2])
        _delta_token(inputs[None], gates, kept, beta, weights, columns, matrix)


def _rates(x, norm, write, decay, weights):
    """beta and g of every row."""
    write, decay = (F.linear(normed(x, norm), rows) for rows in (write, decay))
    return torch.sigmoid(write), weights.rates * F.softplus(decay + weights.offsets)


def _delta_token(inputs, gates, kept, beta, weights, columns, matrix) -> torch.Tensor:
    """[1, heads * value_dim]; `columns` and `matrix` move on."""
    heads, key_dim, value_dim = matrix.shape
    window = torch.cat((columns, inputs.T), 1)
    mixed = F.silu((window * weights.taps).sum(1))
    keys = weights.key_heads * key_dim
    q, k, v = mixed.split((keys, keys, heads * value_dim))
    q, k = (each.view(-1, key_dim) for each in (q, k))
    q, k = (each * torch.rsqrt(each.square().sum(1, keepdim=True) + 1e-6) for each in (q, k))
    q, k = (each.repeat_interleave(heads // weights.key_heads, 0) for each in (q, k))
    matrix.mul_(torch.exp(kept)[:, None, None])
    wanted = v.view(heads, value_dim) - (matrix * k[:, :, None]).sum(1)
    matrix += k[:, :, None] * (beta[:, None] * wanted)[:, None]
    read = (matrix * q[:, :, None]).sum(1) * key_dim**-0.5
    normed_heads = F.rms_norm(read, (value_dim,), weights.norm, weights.eps)
    columns.copy_(window[:, 1:])
    return (normed_heads * F.silu(gates.reshape(heads, value_dim))).view(1, -1)


def router(x, weight, bias, active, *, norm, how, weights, chosen, workspace, shared_gate=None) -> None:
    """`formats.experts.kernel.router`."""
    if shared_gate is not None:
        weights[active:] = torch.sigmoid(F.linear(normed(x, norm), shared_gate))[0]
        chosen[active:] = len(weight)
        weights, chosen = weights[:active], chosen[:active]
    logits = F.linear(normed(x, norm), weight, bias)[0]
    largest, places = logits.topk(active)
    shares = torch.softmax(logits, -1)[places] if how == "softmax_of_all" else torch.softmax(largest, -1)
    weights.copy_(shares)
    chosen.copy_(places)


def matrix_of(stack: Any, expert: int) -> Tensor:
    """[out, in] of one expert."""
    if isinstance(stack, Tensor):
        return stack[expert]
    if isinstance(stack, VqStack):
        return torch.cat([weights_of(each) for each in stack.matrices[expert]])
    if isinstance(stack, GgufStack):
        return torch.cat([gguf_operands.weights_of(each) for each in stack.matrices[expert]])
    if isinstance(stack, Nf4Stack):
        of = stack.matrix
        tables = (of.codes, of.absmax, of.nested_absmax, of.nested_map, torch.tensor(of.offset))
        packed = nf4.Packed(*tables, (of.out_features, of.in_features), torch.float16)
        return nf4.dequantize(packed, torch.float32).view(stack.experts, -1, of.in_features)[expert]
    blocks = stack.blocks[expert]
    return mxfp4.dequantize(mxfp4.Packed(blocks.flatten(1), stack.scales[expert]), torch.float32)


def experts_gate_up(x, stack, bias, chosen, *, norm, gate, interleaved, out, alpha, limit, gates=None) -> None:
    """`formats.experts.kernel.experts_gate_up` of a stack in any format."""
    if isinstance(stack, GgufStack) and stack.has_two_types:
        assert gates is not None
        assert gates.shape == out.shape
    for row, expert in enumerate(chosen.tolist()):
        both = F.linear(normed(x, norm), matrix_of(stack, expert), None if bias is None else bias[expert])[0]
        first, second = (both[0::2], both[1::2]) if interleaved else both.chunk(2)
        if gate == "clamped":
            first, second = first.clamp(max=limit), second.clamp(-limit, limit)
            out[row] = first * torch.sigmoid(alpha * first) * (second + 1)
        else:
            out[row] = ACTIVATIONS[gate](first.clone()) * second


def experts_down(gated, stack, bias, chosen, weights, *, residual, out, behind_gate_up=False, signs=None) -> None:
    """`formats.experts.kernel.experts_down` of a stack in any format, whose x may be rotated."""
    if signs is not None:
        gated = rotation.rotate(gated, signs)
    total = torch.zeros_like(out[0]) if residual is None else residual[0].clone()
    for row, expert in enumerate(chosen.tolist()):
        total += weights[row] * F.linear(gated[row], matrix_of(stack, expert), None if bias is None else bias[expert])
    out.copy_(total)


def embed(ids, table, *, scale, out) -> None:
    """`kernels.embed.embed`."""
    out.copy_(table[ids] * scale)


def rmsnorm(x, norm, residual=None, *, out) -> None:
    """`kernels.rmsnorm.rmsnorm`."""
    result = normed(x, norm)
    out.copy_(result if residual is None else residual + result)


def hadamard(x, signs, out) -> None:
    """`formats.codebooks.rotation_kernel.hadamard`."""
    out.copy_(rotation.rotate(x, signs))


def install(monkeypatch: Any) -> None:
    """Put them in the place of the kernels, for the fused step."""
    from localq.engine.step import fused, fused_delta, fused_experts, fused_norms
    from localq.formats.codebooks import rotation_kernel
    from localq.kernels import dense

    workspace = SimpleNamespace(bytes=lambda: 0)
    monkeypatch.setattr(dense, "dense_gemv", dense_gemv)
    monkeypatch.setattr(fused.attention, "attention_decode", attention_decode)
    monkeypatch.setattr(fused.attention, "workspaces", lambda shapes, *_: dict.fromkeys(shapes, workspace))
    for stand_in in (delta_decode, delta_verify, delta_replay):
        monkeypatch.setattr(fused_delta.delta_net, stand_in.__name__, stand_in)
    for stand_in in (router, experts_gate_up, experts_down):
        monkeypatch.setattr(fused_experts.expert_kernel, stand_in.__name__, stand_in)
    monkeypatch.setattr(fused.embed, "embed", embed)
    monkeypatch.setattr(fused_norms.rmsnorm, "rmsnorm", rmsnorm)
    monkeypatch.setattr(rotation_kernel, "hadamard", hadamard)
