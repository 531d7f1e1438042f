"""Stand-ins for the compiled kernels: the same operations by torch on the CPU, for what is built around kernels.

`install` puts them into the wrappers' modules; what calls a wrapper by its module then runs without a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.engine import sampler
from localq.kernels import attention, dense, embed, int8, nf4, rmsnorm, sampling
from localq.quant import int8 as int8_format
from localq.quant import nf4_tiles
from localq.quant.nf4 import Packed
from localq.quant.nf4 import dequantize as nf4_values

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}


def install(monkeypatch) -> None:
    """All of them, until the test ends."""
    monkeypatch.setattr(nf4, "nf4_gemv", nf4_gemv)
    monkeypatch.setattr(nf4, "nf4_gemm", nf4_gemm, raising=False)
    monkeypatch.setattr(nf4, "nf4_dequantize", nf4_dequantize)
    monkeypatch.setattr(dense, "dense_gemv", dense_gemv, raising=False)
    monkeypatch.setattr(int8, "int8_gemv", int8_gemv, raising=False)
    monkeypatch.setattr(embed, "embed", embedded)
    monkeypatch.setattr(rmsnorm, "rmsnorm", normed)
    monkeypatch.setattr(sampling, "sample", sampled)
    monkeypatch.setattr(attention, "attention_decode", attention_decode)
    monkeypatch.setattr(attention, "Workspace", lambda heads, kv_heads, head_dim, device: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)


def nf4_weight(matrix: nf4.Nf4Matrix, dtype: torch.dtype) -> Tensor:
    shape = (matrix.out_features, matrix.in_features)
    codes, absmax = matrix.codes.view(shape[0], -1), matrix.absmax
    if matrix.tiled:
        codes, absmax = nf4_tiles.untile(codes, absmax, shape)
    offset = torch.tensor(matrix.offset, dtype=torch.float32)
    packed = Packed(codes, absmax, matrix.nested_absmax, matrix.nested_map, offset, shape, dtype)
    return nf4_values(packed, dtype)


def nf4_dequantize(matrix, dtype, out=None):
    weight = nf4_weight(matrix, dtype)
    return weight if out is None else out.copy_(weight)


def product(x, weights, biases=None, norm=None, residual=None, activation=None, out=None):
    """In f32, rounded once."""
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    parts = [wide @ weight.float().T for weight in weights]
    whole = ACTIVATIONS[activation](parts[0]) * parts[1] if activation else torch.cat(parts, 1)
    if residual is not None:
        whole = whole + residual.float()
    return whole.to(x.dtype) if out is None else out.copy_(whole)


def nf4_gemv(x, matrices, **around):
    return product(x, [nf4_weight(matrix, torch.float32) for matrix in matrices], **around)


def nf4_gemm(x, matrix, **around):
    return product(x, [nf4_weight(matrix, torch.float32)], **around)


def dense_gemv(x, weights, **around):
    return product(x, weights, **around)


def int8_gemv(x, matrices, **around):
    weights = [int8_format.dequantize(matrix, torch.float32) for matrix in matrices]
    return product(x, weights, **around)


def embedded(ids, table, scale=1.0, out=None):
    rows = table[ids] * scale
    return rows if out is None else out.copy_(rows)


def normed(x, norm, residual=None, out=None):
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    if residual is not None:
        wide = wide.to(x.dtype).float() + residual.float()
    return out.copy_(wide)


def sampled(logits, state, *, greedy, softcap=0.0, chosen, token, position=None):
    chosen.copy_(sampler.sample(logits, state, greedy))
    token.copy_(chosen)
    state.advance(token)
    if position is not None:
        position.add_(1)


def attention_decode(
    qkv, layer, position, *, heads, scale, workspace, rotary, q_norm, k_norm, softcap, window, out=None
):
    """Without norms, rotation, cap and window. The cache in 8 and 4 bit is read through `quant.kv_codec`."""
    from localq.quant import kv_codec

    width, slot = layer.head_dim, int(position)
    q = qkv[0, : heads * width].view(heads, 1, width).float()
    new = qkv[0, heads * width :].view(2, layer.kv_heads, width)
    read = []
    for stored, scales, part in ((layer.k, layer.k_scales, new[0]), (layer.v, layer.v_scales, new[1])):
        if layer.bits == 16:
            stored[:, slot] = part
            values = stored[:, : slot + 1].float()
        else:
            stored[:, slot], scales[:, slot] = kv_codec.quantize(part, layer.bits)
            values = kv_codec.dequantize(stored[:, : slot + 1], scales[:, : slot + 1], layer.bits, torch.float32)
        read.append(values.repeat_interleave(heads // layer.kv_heads, 0))
    attended = torch.softmax(q @ read[0].transpose(-1, -2) * scale, -1) @ read[1]
    result = attended.reshape(1, -1).to(qkv.dtype)
    return result if out is None else out.copy_(result)
