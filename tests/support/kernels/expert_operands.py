"""Operands for the tests of mixtures of experts: stacks of every format, and what must come out.

References are in fp64 of the same 16-bit inputs; beside them what torch gives in 16 bit, which sets the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.formats import mxfp4, nf4
from localq.formats.cases import TIMES_NAIVE
from localq.formats.experts.stacks import Mxfp4Stack, Nf4Stack, Stack
from localq.formats.mxfp4.kernel import Mxfp4Operand
from localq.formats.nf4 import Packed as Nf4Packed
from localq.kernels.gemv import Norm
from tests.support.kernels.nf4_operands import operands_of
from tests.support.kernels.row_operands import normed

ALPHA, LIMIT = 1.702, 7.0


@dataclass(frozen=True)
class Experts:
    """A stack as the kernels take it, and its weights f32 [E, out, in] by the definition of its format."""

    stack: Stack
    dense: Tensor


def mxfp4_packed(out: int, columns: int, seed: int, device: str = "cpu") -> mxfp4.Packed:
    """Every code occurs; scales over nine powers of two, of some rows 16 times the others, in a few blocks 0."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (out, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(116, 125, (out, columns // 32), dtype=torch.uint8, generator=generator)
    scales[::7] += 4
    scales[1::13, 0] = 0
    return mxfp4.Packed(codes, scales).to(device)


def mxfp4_matrix(out: int, columns: int, seed: int, device: str = "cpu") -> tuple[Mxfp4Operand, Tensor]:
    """As the kernels take it, and its weights f32."""
    packed = mxfp4_packed(out, columns, seed, device)
    return Mxfp4Operand(packed.codes, packed.scales), mxfp4.dequantize(packed, torch.float32)


def _mxfp4(shape: tuple[int, int, int], dtype: torch.dtype, seed: int, device: str) -> Experts:
    experts, out, columns = shape
    packed = mxfp4_packed(experts * out, columns, seed, device)
    dense = mxfp4.dequantize(packed, torch.float32).view(shape)
    blocks = packed.codes.view(experts, out, columns // 32, 16)
    return Experts(Mxfp4Stack(blocks, packed.scales.view(experts, out, columns // 32)), dense)


def _nf4(nested: bool) -> Callable[[tuple[int, int, int], torch.dtype, int, str], Experts]:
    def make(shape: tuple[int, int, int], dtype: torch.dtype, seed: int, device: str) -> Experts:
        experts, out, columns = shape
        generator = torch.Generator().manual_seed(seed)
        blocks = experts * out * columns // nf4.BLOCK
        nested_absmax = 0.005 + 0.01 * torch.rand(-(-blocks // nf4.NESTED_BLOCK), generator=generator)
        codes = torch.randint(256, (experts * out, columns // 2), dtype=torch.uint8, generator=generator)
        absmax = torch.randint(256, (blocks,), dtype=torch.uint8, generator=generator)
        packed = Nf4Packed(
            codes, absmax, nested_absmax, nf4.dynamic_map(), torch.tensor(0.02), (experts * out, columns), torch.float16
        )
        if not nested:
            scales = nf4.absmax_f32(packed).flatten().contiguous()
            packed = Nf4Packed(codes, scales, None, None, None, packed.shape, torch.float16)
        found = operands_of(packed.to(device))
        return Experts(Nf4Stack(found.matrix, experts), found.dense.view(shape))

    return make


def _plain(shape: tuple[int, int, int], dtype: torch.dtype, seed: int, device: str) -> Experts:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    weight[:, ::7] *= 5
    stored = weight.to(dtype).to(device)
    return Experts(stored, stored.float())


# Name -> (shape [E, out, in], dtype of x, seed, device) -> operands.
FORMATS: dict[str, Callable[[tuple[int, int, int], torch.dtype, int, str], Experts]] = {
    "mxfp4": _mxfp4, "nf4": _nf4(True), "nf4, scales in f32": _nf4(False), "16 bit": _plain,
}  # fmt: skip


def chosen_of(experts: int, active: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Different experts int32 [active], and weights f32 [active] that sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(experts, generator=generator)[:active].int()
    weights = torch.softmax(torch.randn(active, generator=generator), 0)
    return chosen.to(device), weights.to(device)


def experts_of_tokens(experts: int, active: int, tokens: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Different experts int64 [tokens, active], lower ones more often, the last never; weights f32 that sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    liked = torch.linspace(1.0, 0.0, experts)
    chosen = (liked + 0.4 * torch.rand(tokens, experts, generator=generator))[:, : max(experts - 1, active)]
    weights = torch.softmax(torch.randn(tokens, active, generator=generator), -1)
    return chosen.topk(active, -1).indices.to(device), weights.to(device)


def _halves(both: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    first, second = (both[..., 0::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
    return first, second


def gated(both: Tensor, gate: str, interleaved: bool) -> Tensor:
    """both [..., 2 w] -> [..., w]."""
    first, second = _halves(both, interleaved)
    if gate == "silu":
        return F.silu(first) * second
    if gate == "gelu_pytorch_tanh":
        return F.gelu(first, approximate="tanh") * second
    first, second = first.clamp(max=LIMIT), second.clamp(-LIMIT, LIMIT)
    return first * torch.sigmoid(ALPHA * first) * (second + 1)


def gate_up(
    x: Tensor, dense: Tensor, bias: Tensor | None, chosen: Tensor, norm: Norm | None, gate: str, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """(fp64, 16 bit) [k, w]. dense f32 [E, 2 w, in]."""
    given = x if norm is None else normed(x, norm)
    weight, shift = dense[chosen.long()], None if bias is None else bias[chosen.long()]
    exact = torch.einsum("koi,i->ko", weight.double(), given[0].double())
    naive = torch.stack([F.linear(given, each.to(x.dtype))[0] for each in weight])
    if shift is not None:
        exact, naive = exact + shift.double(), naive + shift
    return gated(exact, gate, interleaved), gated(naive, gate, interleaved)


def down(
    gated: Tensor, dense: Tensor, bias: Tensor | None, chosen: Tensor, weights: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(fp64, 16 bit) [1, out]. gated T [k, w], dense f32 [E, out, w]."""
    weight = dense[chosen.long()]
    exact = torch.einsum("koi,ki->ko", weight.double(), gated.double())
    naive = torch.stack([F.linear(row, each.to(row.dtype)) for row, each in zip(gated, weight, strict=True)])
    if bias is not None:
        exact, naive = exact + bias[chosen.long()].double(), naive + bias[chosen.long()]
    exact, naive = (weights.double() @ exact)[None], (weights.to(naive.dtype) @ naive)[None]
    return (exact, naive) if residual is None else (exact + residual.double(), naive + residual)


def assert_near(got: Tensor, exact: Tensor, naive: Tensor) -> None:
    """`got` may be twice as far from fp64 as torch in 16 bit is."""
    error, allowed = (got.double() - exact).abs().max().item(), (naive.double() - exact).abs().max().item()
    allowed = TIMES_NAIVE * allowed + 1e-6 * exact.abs().max().item()
    assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"
