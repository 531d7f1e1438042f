"""Stand-ins for the kernels of mixtures, of MXFP4 and of rows with 16 values, as `reference_kernels.py` has the others.

Those of a mixture compute as the stand-ins of a step do (`step_stand_ins.py`), in f32, of stacks in every format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localq.engine.load import grouped_experts
from localq.formats import mxfp4 as mxfp4_format
from localq.formats import nf4 as nf4_format
from localq.formats.codebooks import experts_kernel as codebook_experts
from localq.formats.codebooks.experts_kernel import VqStack
from localq.formats.codebooks.rotation import rotate
from localq.formats.experts import grouped, stacks
from localq.formats.experts import kernel as expert_kernel
from localq.formats.experts.grouped import Entries
from localq.formats.experts.stacks import Mxfp4Stack
from localq.formats.gguf import experts_kernel as gguf_experts
from localq.formats.gguf.experts_kernel import GgufStack
from localq.formats.mxfp4 import kernel as mxfp4_kernel
from localq.formats.squeezellm import kernel as squeezellm_kernel
from localq.kernels.gemv import Norm
from tests.support.engine import step_stand_ins
from tests.support.kernels import expert_operands, gguf_operands
from tests.support.kernels.row_operands import rowlut_weights
from tests.support.kernels.vq_stacks import dense_of


def weights_of(stack):
    """f32 [E, out, in]."""
    if isinstance(stack, Tensor):
        return stack.float()
    if isinstance(stack, VqStack):
        return dense_of(stack)
    if isinstance(stack, GgufStack):
        return gguf_operands.dense_of(stack)
    if isinstance(stack, Mxfp4Stack):
        rows = stack.experts * stack.out_features
        packed = mxfp4_format.Packed(stack.blocks.view(rows, -1), stack.scales.view(rows, -1))
        return mxfp4_format.dequantize(packed, torch.float32).view(stack.experts, -1, stack.in_features)
    of = stack.matrix
    tables = (of.codes, of.absmax, of.nested_absmax, of.nested_map, torch.tensor(of.offset))
    packed = nf4_format.Packed(*tables, (of.out_features, of.in_features), torch.float16)
    return nf4_format.dequantize(packed, torch.float32).view(stack.experts, -1, of.in_features)


def _wide(given):
    """A norm or a tensor in f32; None stays."""
    if isinstance(given, Norm):
        return Norm(given.weight.float(), given.eps)
    return None if given is None else given.float()


def router(x, weight, bias, active, *, norm, how, weights, chosen, workspace, shared_gate=None):
    x, weight, bias, norm, shared_gate = (_wide(each) for each in (x, weight, bias, norm, shared_gate))
    step_stand_ins.router(
        x, weight, bias, active, norm=norm, how=how, weights=weights, chosen=chosen, workspace=workspace,
        shared_gate=shared_gate,
    )  # fmt: skip
    logits = torch.nn.functional.linear(step_stand_ins.normed(x, norm), weight, bias)
    workspace[1:].view(torch.float32).copy_(logits[0])


def route(logits, active, *, how, weights, chosen):
    order = logits.flatten().argsort(descending=True, stable=True)[:active]
    shares = torch.softmax(logits.flatten(), 0)[order]
    weights.copy_(shares if how == "softmax_of_all" else shares / shares.sum())
    chosen.copy_(order)


def experts_gate_up(x, stack, bias, chosen, *, norm, gate, interleaved, out, alpha=1.702, limit=7.0, gates=None):
    result = torch.empty(out.shape)
    step_stand_ins.experts_gate_up(
        x.float(), weights_of(stack), _wide(bias), chosen, norm=_wide(norm), gate=gate, interleaved=interleaved,
        out=result, alpha=alpha, limit=limit,
    )  # fmt: skip
    return out.copy_(result)


def experts_down(gated, stack, bias, chosen, weights, *, residual, out, behind_gate_up=False, signs=None):
    result = torch.empty(out.shape)
    if signs is not None:
        gated = rotate(gated, signs)
    given = (gated.float(), weights_of(stack), _wide(bias), chosen, weights)
    step_stand_ins.experts_down(*given, residual=_wide(residual), out=result, behind_gate_up=True)
    return out.copy_(result)


def experts_sort(chosen, experts):
    flat = chosen.flatten().clamp(0, experts - 1)
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=experts)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    held = (order // chosen.shape[1], places, counts.cumsum(0), (-(-counts // grouped.TILE)).cumsum(0))
    return Entries(len(order), experts, torch.cat(held).int())


class ExpertsGemm:
    """`grouped.ExpertsGemm`."""

    def __init__(self, stack, dtype):
        self.stack, (_, self.rows, self.columns) = stack, stacks.shape_of(stack)

    def __call__(self, x, bias, entries, *, gate, out, first=0):
        ends = [0, *entries.ends.tolist()]
        for number, weight in enumerate(weights_of(self.stack)):
            places = slice(ends[first + number], ends[first + number + 1])
            of = x[entries.rows[places].long()] if gate is not None else x[places]
            both = of.float() @ weight.T + (0 if bias is None else bias[number].float())
            if gate is not None:
                both = expert_operands.gated(both.to(x.dtype).float(), gate.name, gate.interleaved)
            out[places] = both.to(x.dtype)
        return out


def experts_gemm(x, stack, bias, entries, *, gate, out, first=0):
    return ExpertsGemm(stack, x.dtype)(x, bias, entries, gate=gate, out=out, first=first)


def experts_sum(x, entries, weights, out):
    each = x[entries.places.long()].view(*weights.shape, -1).float()
    return out.copy_((weights[..., None] * each).sum(1))


def vq_experts_gate_up(x, stack, chosen, *, norm, out):
    return experts_gate_up(x, stack, None, chosen, norm=norm, gate="silu", interleaved=False, out=out)


def vq_experts_down(gated, stack, chosen, weights, *, residual, out, signs=None):
    return experts_down(gated, stack, None, chosen, weights, residual=residual, out=out, signs=signs)


def gguf_experts_gate_up(x, stack, chosen, *, norm, out, gates=None, gate="silu"):
    assert (gates is None) != stack.has_two_types
    return experts_gate_up(x, stack, None, chosen, norm=norm, gate=gate, interleaved=False, out=out)


def gguf_experts_down(gated, stack, chosen, weights, *, residual, out, behind_gate_up=False):
    return vq_experts_down(gated, stack, chosen, weights, residual=residual, out=out)


def mxfp4_dequantize(matrix, dtype, out=None, rows=None):
    part = slice(None) if rows is None else slice(rows[0], sum(rows))
    return mxfp4_format.dequantize(mxfp4_format.Packed(matrix.codes[part], matrix.scales[part]), dtype, out)


def mxfp4_gemv(x, matrices, **around):
    from tests.support.kernels.reference_kernels import product  # which installs those of this file

    return product(x, [mxfp4_dequantize(each, torch.float32) for each in matrices], **around)


def rowlut_gemv(x, matrices, **around):
    from tests.support.kernels.reference_kernels import product

    return product(x, [rowlut_weights(each, torch.float32) for each in matrices], **around)


def rowlut_dequantize(matrix, first, out):
    return out.copy_(rowlut_weights(matrix, torch.float32)[first : first + len(out)])


def install(monkeypatch):
    """All of them, until the test ends."""
    for stand_in in (router, route, experts_gate_up, experts_down):
        monkeypatch.setattr(expert_kernel, stand_in.__name__, stand_in)
    for stand_in in (experts_sort, experts_gemm, ExpertsGemm, experts_sum):
        monkeypatch.setattr(grouped, stand_in.__name__, stand_in)
    monkeypatch.setattr(grouped_experts, "ExpertsGemm", ExpertsGemm)
    for module, stand_in in (
        (codebook_experts, vq_experts_gate_up), (codebook_experts, vq_experts_down),
        (gguf_experts, gguf_experts_gate_up), (gguf_experts, gguf_experts_down),
        (mxfp4_kernel, mxfp4_gemv), (mxfp4_kernel, mxfp4_dequantize), (squeezellm_kernel, rowlut_gemv),
        (squeezellm_kernel, rowlut_dequantize),
    ):  # fmt: skip
        monkeypatch.setattr(module, stand_in.__name__, stand_in)
