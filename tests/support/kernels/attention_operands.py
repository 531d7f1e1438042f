"""Operands for the tests of decode attention, and its definition in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kv_bits
from localq.engine import kv_codec
from localq.engine.cache import KVCache
from localq.files.layer_caches import KeysAndValues
from localq.kernels.attention import AttentionWorkspace, KVLayer, attention_decode
from localq.kernels.gemv import Norm
from localq.kv_bits import KvBits
from localq.models.rope import Rope, rotate


@dataclass(frozen=True)
class Case:
    """One layer at one position. `rotary` columns turn (0 = none); `norm` is "", "llama" or "gemma"; `gate` is "",
    "in q" (behind q of every head) or "apart" (in another tensor)."""

    heads: int
    kv_heads: int
    head_dim: int
    position: int
    capacity: int
    dtype: torch.dtype = torch.float16
    bits: KvBits = 16
    rotary: int = 0
    norm: str = ""
    softcap: float = 0.0
    window: int = 0
    sinks: float | None = None  # added to random ones; None = there are none
    gate: str = ""

    @property
    def q_stride(self) -> int:
        return self.head_dim * (2 if self.gate == "in q" else 1)

    @property
    def first(self) -> int:
        return max(0, self.position + 1 - self.window) if self.window else 0


class Operands:
    """Everything on the GPU, or elsewhere without a kernel; slots that must not be read are NaN (16 bit) or have NaN
    for a scale."""

    def __init__(self, case: Case, seed: int = 0, device: str = "cuda") -> None:
        self.case, self._device = case, torch.device(device)
        generator = torch.Generator().manual_seed(seed)
        k, v = torch.randn(2, case.position + 1, case.kv_heads, case.head_dim, generator=generator)
        k[:, :, 5] *= 8  # a channel that stands out, as in real keys
        v[::7] *= 3
        qkv = torch.randn(1, case.heads * case.q_stride + 2 * case.kv_heads * case.head_dim, generator=generator)
        qkv[:, ::53] *= 4
        self.qkv = qkv.to(case.dtype).to(device)
        self.gate = None
        if case.gate == "in q":
            self.gate = self.queries[:, case.head_dim :]
        elif case.gate:
            gate = 3 * torch.randn(case.heads, case.head_dim, generator=generator)
            self.gate = gate.to(case.dtype).to(device)
        self.rotary = None
        if case.rotary:
            self.rotary = Rope("default", 500.0, case.rotary).table(case.capacity, case.dtype, self._device)
        self.q_norm, self.k_norm = (self._norm(generator) for _ in range(2))
        self.sinks = None
        if case.sinks is not None:
            self.sinks = (case.sinks + 2 * torch.randn(case.heads, generator=generator)).to(case.dtype).to(device)
        self.scale = 0.7 * case.head_dim**-0.5
        cache = KVCache([KeysAndValues(case.kv_heads, case.head_dim)], case.capacity, case.dtype, device, case.bits)
        if case.position:
            old = torch.arange(case.position, device=device)
            cache.update(0, *(part[:-1].to(case.dtype).to(device) for part in (k, v)), old, case.position)
        self.layer: KVLayer = cache.layer(0)
        for hidden in (slice(0, case.first), slice(case.position, None)):
            for tensor in poisonable(self.layer):
                tensor[:, hidden] = torch.nan
        self.position = torch.tensor([case.position], device=device)
        if self._device.type == "cuda":
            self.workspace = AttentionWorkspace(case.heads, case.kv_heads, case.head_dim, self._device)

    def _norm(self, generator: torch.Generator) -> Norm | None:
        if not self.case.norm:
            return None
        weight = (1 + 0.3 * torch.randn(self.case.head_dim, generator=generator)).to(self._device)
        return Norm(weight.to(self.case.dtype) if self.case.norm == "llama" else weight, 1e-5)

    @property
    def queries(self) -> Tensor:
        """[heads, q_stride]: q of every head, and what lies behind it."""
        return self.qkv[0, : self.case.heads * self.case.q_stride].view(self.case.heads, -1)

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [heads, head_dim] of `qkv`."""
        case = self.case
        k, v = self.qkv[0, case.heads * case.q_stride :].view(2, case.kv_heads, case.head_dim)
        return self.queries[:, : case.head_dim], k, v

    def run(self, out: Tensor | None = None, layer: KVLayer | None = None, base: Tensor | None = None) -> Tensor:
        """The kernel. layer, base: a cache in which slot 0 has another position."""
        case = self.case
        return attention_decode(
            self.qkv,
            layer or self.layer,
            self.position,
            heads=case.heads,
            rotary=self.rotary,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            scale=self.scale,
            softcap=case.softcap,
            window=case.window,
            workspace=self.workspace,
            sinks=self.sinks,
            base=base,
            q_stride=case.q_stride,
            gate=self.gate,
            out=out,
        )

    def token(self, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [heads, head_dim] of the token after norm and rotation: in fp64, or as the modules do in 16 bit."""
        q, k, v = (part.to(wide) for part in self.parts())
        return self._prepared(q, self.q_norm), self._prepared(k, self.k_norm), v

    def _prepared(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is not None:
            precise = torch.promote_types(x.dtype, torch.float32)
            unit = torch.nn.functional.rms_norm(x.to(precise), x.shape[-1:], None, norm.eps)
            if self.case.norm == "llama":
                x = unit.to(x.dtype) * norm.weight.to(x.dtype)
            else:
                x = (unit * norm.weight).to(x.dtype)
        if self.rotary is None:
            return x
        cos, sin = self.rotary[self.case.position].to(x.dtype)
        return rotate(x[None], cos[None, None], sin[None, None])[0]

    def visible(self, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """k, v [kv_heads, slots, head_dim] that the token sees, read from the cache after `run`."""
        live = slice(self.case.first, self.case.position + 1)
        layer = self.layer
        if layer.bits == 16:
            return layer.k[:, live].to(wide), layer.v[:, live].to(wide)
        assert layer.k_scales is not None
        assert layer.v_scales is not None
        key_bits, value_bits = kv_bits.split(layer.bits)
        k = kv_codec.dequantize(layer.k[:, live], layer.k_scales[:, live], key_bits, torch.float32)
        v = kv_codec.dequantize(layer.v[:, live], layer.v_scales[:, live], value_bits, torch.float32)
        return k.to(wide), v.to(wide)

    def attended(self, wide: torch.dtype, turned: bool = False) -> Tensor:
        """The definition in `wide` over what `run` left in the cache -> [1, heads * head_dim]. Scores in f32 at least,
        as fused kernels have them; q and the weights rounded to `wide`, q besides to f16 where it is `turned`."""
        case = self.case
        q, _, _ = self.token(wide)
        k, v = self.visible(wide)
        group = case.heads // case.kv_heads
        precise = torch.promote_types(wide, torch.float32)
        q = q.view(case.kv_heads, group, case.head_dim)
        if turned:
            q = kv_codec.rotate(kv_codec.rotate(q.float()).half().float())
        scores = (q.to(precise) @ k.to(precise).transpose(1, 2)) * self.scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.to(precise).view(case.kv_heads, group, 1)), -1)
        weights = torch.softmax(scores, -1)[..., : k.shape[1]].to(wide)
        gathered = (weights @ v).reshape(1, -1)
        if self.gate is None:
            return gathered
        return (gathered.to(precise) * torch.sigmoid(self.gate.to(precise).reshape(1, -1))).to(wide)


def poisonable(layer: KVLayer) -> list[Tensor]:
    """The tensors of a layer in which a NaN spoils what is read."""
    scales = [each for each in (layer.k_scales, layer.v_scales) if each is not None]
    return scales or [layer.k, layer.v]


def assert_as_good_as_16_bit(got: Tensor, operands: Operands) -> None:
    """`got` may be twice as far from fp64 as the definition with 16-bit operands, weights and result is.

    Codes are multiplied by q turned, which tensor cores take in f16: one rounding more, of the size of q's own. To
    first order a head is off by scale * Cov(v, k) dq, with the covariance under its weights. Where few slots have the
    weight, as in a window, that has one large direction: the error is one random number and no mean of many, and the
    other roundings do not tell how large. So the definition is asked with this rounding too, and the farther one
    counts. With sinks and a window of 128, at head_dim 64 and 4 bit, the kernel's roundings done on the CPU are off by
    1.314e-3, those of q alone by 1.22e-3, without this one by 0.26e-3; the definition is off by 0.657e-3, with this one
    by 0.97e-3.
    """
    exact, dtype = operands.attended(torch.float64), operands.case.dtype
    kinds = (False, True) if operands.case.bits != 16 else (False,)
    naive = max((operands.attended(dtype, turned).double() - exact).abs().max().item() for turned in kinds)
    error = (got.double() - exact).abs().max().item()
    assert error <= 2 * naive + 1e-6 * exact.abs().max().item(), f"off by {error:.3g}, naive {naive:.3g}"
