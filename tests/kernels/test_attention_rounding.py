"""The roundings of `attention_decode` over codes, done on the CPU: what its tests allow covers them, and no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localq import kv_bits
from localq.engine import kv_codec
from localq.kv_bits import K8V4
from localq.models.rope import rotate
from tests.support.kernels.attention_operands import Case, Operands, assert_as_good_as_16_bit

F16 = torch.float16
LIFT = 2.0**6  # csrc/attention/decode.cuh: what P is too large by
# Of those at head_dim 64 the farthest off: the rounding of the turned q hits the one head that hangs on few scores.
CASES = {
    "sinks and window, 4 bit": Case(12, 4, 64, 700, 1024, bits=4, rotary=64, sinks=1.0, window=128),
    "window, k8v4": Case(12, 4, 64, 700, 1024, bits=K8V4, rotary=64, window=129),
}


def turned(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """f32, as the codes stand: `dequantize` turns them back, which is undone."""
    return kv_codec.rotate(kv_codec.dequantize(codes, scales, bits, torch.float32))


def rounded_as_the_kernel_does(operands: Operands) -> Tensor:
    """`Operands.run` of a case without norms: f16 where the kernel has it, fp64 where it has f32."""
    case, layer = operands.case, operands.layer
    q, k, v = operands.qkv.view(-1, case.head_dim).split([case.heads, case.kv_heads, case.kv_heads])
    cos, sin = operands.rotary[case.position].float()  # a rotation is rounded once
    q, k = (rotate(each[None].float(), cos[None, None], sin[None, None])[0].to(F16) for each in (q, k))
    key_bits, value_bits = kv_bits.split(layer.bits)
    layer.k[:, case.position], layer.k_scales[:, case.position] = kv_codec.quantize(k, key_bits)
    layer.v[:, case.position], layer.v_scales[:, case.position] = kv_codec.quantize(v, value_bits)
    live = slice(case.first, case.position + 1)
    keys = turned(layer.k[:, live], layer.k_scales[:, live], key_bits)
    values = turned(layer.v[:, live], layer.v_scales[:, live], value_bits)
    values[:, :-1] = values[:, :-1].to(F16)  # the token's own stays in f32, as its weight does
    x = kv_codec.rotate(q.float()).to(F16).view(case.kv_heads, -1, case.head_dim)
    scores = x.double() @ keys.double().transpose(1, 2) * operands.scale
    highest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - highest) * LIFT
    total = weights.sum(-1, keepdim=True)
    if operands.sinks is not None:
        total += torch.exp(operands.sinks.double().view(case.kv_heads, -1, 1) - highest) * LIFT
    weights[..., :-1] = weights[..., :-1].to(F16)
    return kv_codec.rotate((weights @ values.double() / total).float()).to(F16).view(1, -1)


@pytest.mark.parametrize("name", CASES)
def test_what_is_allowed_covers_the_kernels_roundings_and_not_a_hundredth(name):
    operands = Operands(CASES[name], seed=64, device="cpu")
    got = rounded_as_the_kernel_does(operands)
    assert_as_good_as_16_bit(got, operands)
    got[0, got.view(12, 64).abs().amax(1).argmax() * 64 :][:64] *= 1.01
    with pytest.raises(AssertionError, match="off by"):
        assert_as_good_as_16_bit(got, operands)
