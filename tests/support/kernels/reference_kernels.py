"""Stand-ins for the compiled kernels: the same operations by torch on the CPU, for what is built around kernels.

`install` puts them into the wrappers' modules; what calls a wrapper by its module then runs without a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.engine import sampler
from localq.engine.selftest import delta_nets
from localq.formats import int8 as int8_format
from localq.formats.bcq import codec as bcq_codec
from localq.formats.bcq import kernel as bcq_kernel
from localq.formats.bcq import tiles as bcq_tiles
from localq.formats.codebooks import (
    adjoint_kernel,
    aqlm,
    dequantize_kernel,
    gather_kernel,
    lookup_kernel,
    rotation,
    rotation_kernel,
    search_kernel,
    unpack_kernel,
)
from localq.formats.codebooks import tiles as codebook_tiles
from localq.formats.gguf import codec as gguf_codec
from localq.formats.gguf import kernel as gguf_kernel
from localq.formats.gguf import tiles as gguf_tiles
from localq.formats.int4 import codec as int4_codec
from localq.formats.int4 import kernel as int4_kernel
from localq.formats.int4 import tiles as int4_tiles
from localq.formats.int8 import kernel as int8_kernel
from localq.formats.nf4 import Packed
from localq.formats.nf4 import dequantize as nf4_values
from localq.formats.nf4 import kernel as nf4_kernel
from localq.formats.nf4 import tiles as nf4_tiles
from localq.formats.scaled import kernel as scaled_kernel
from localq.formats.vptq import codec as vptq_codec
from localq.formats.vptq import kernel as vptq_kernel
from localq.kernels import attention, delta_net, dense, embed, logit_adjust, rmsnorm, sampling
from tests.support.kernels import adjoint_operands, reference_experts, scaled_operands
from tests.support.kernels.vq_operands import weights_of

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}


def install(monkeypatch) -> None:
    """All of them, until the test ends."""
    reference_experts.install(monkeypatch)
    monkeypatch.setattr(nf4_kernel, "nf4_gemv", nf4_gemv)
    monkeypatch.setattr(nf4_kernel, "nf4_gemm", nf4_gemm, raising=False)
    monkeypatch.setattr(nf4_kernel, "nf4_dequantize", nf4_dequantize)
    monkeypatch.setattr(dense, "dense_gemv", dense_gemv, raising=False)
    monkeypatch.setattr(int8_kernel, "int8_gemv", int8_gemv, raising=False)
    monkeypatch.setattr(int4_kernel, "int4_gemv", int4_gemv)
    monkeypatch.setattr(int4_kernel, "int4_dequantize", int4_dequantize)
    monkeypatch.setattr(gguf_kernel, "gguf_gemv", gguf_gemv)
    monkeypatch.setattr(gguf_kernel, "gguf_dequantize", gguf_dequantize)
    monkeypatch.setattr(scaled_kernel, "scaled_gemv", scaled_gemv)
    monkeypatch.setattr(scaled_kernel, "scaled_dequantize", scaled_dequantize)
    monkeypatch.setattr(unpack_kernel, "additive_dequantize", additive_dequantize)
    monkeypatch.setattr(vptq_kernel, "vptq_dequantize", vptq_dequantize)
    monkeypatch.setattr(gather_kernel, "gather_gemv", gather_gemv)
    monkeypatch.setattr(vptq_kernel, "vptq_gemv", vptq_gemv)
    monkeypatch.setattr(gather_kernel, "gather_roof", lambda table, step, loads, sums: sums.zero_())
    monkeypatch.setattr(lookup_kernel, "vq_gemv", vq_gemv)
    monkeypatch.setattr(dequantize_kernel, "vq_dequantize", vq_dequantize)
    monkeypatch.setattr(bcq_kernel, "bcq_gemv", bcq_gemv)
    monkeypatch.setattr(bcq_kernel, "bcq_dequantize", bcq_dequantize)
    monkeypatch.setattr(rotation_kernel, "hadamard", rotated)
    monkeypatch.setattr(search_kernel, "vq_search", vq_search)
    monkeypatch.setattr(adjoint_kernel, "vq_adjoint", vq_adjoint)
    monkeypatch.setattr(search_kernel.Search, "launch", lambda prepared: None)
    monkeypatch.setattr(embed, "embed", embedded)
    monkeypatch.setattr(rmsnorm, "rmsnorm", normed)
    monkeypatch.setattr(logit_adjust, "dry_match", dry_matched)
    monkeypatch.setattr(logit_adjust, "adjust", adjusted)
    monkeypatch.setattr(sampling, "sample", sampled)
    monkeypatch.setattr(attention, "attention_decode", attention_decode)
    monkeypatch.setattr(attention, "AttentionWorkspace", lambda heads, kv_heads, head_dim, device: None)
    monkeypatch.setattr(delta_net, "delta_decode", delta_decoded)
    monkeypatch.setattr(delta_net, "delta_verify", delta_verified)
    monkeypatch.setattr(delta_net, "delta_prefill", delta_prefilled)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)


def nf4_weight(matrix: nf4_kernel.Nf4Operand, dtype: torch.dtype) -> Tensor:
    shape = (matrix.out_features, matrix.in_features)
    codes, absmax = matrix.codes.view(shape[0], -1), matrix.absmax
    if matrix.tiled:
        codes, absmax = nf4_tiles.untile(codes, absmax, shape)
    offset = torch.tensor(matrix.offset, dtype=torch.float32)
    packed = Packed(codes, absmax, matrix.nested_absmax, matrix.nested_map, offset, shape, dtype)
    return nf4_values(packed, dtype)


def nf4_dequantize(matrix, dtype, out=None, rows=None):
    weight = nf4_weight(matrix, dtype)
    weight = weight if rows is None else weight[rows[0] : sum(rows)]
    return weight if out is None else out.copy_(weight)


def product(x, weights, norm=None, residual=None, activation=None, out=None):
    """In f32, rounded once."""
    wide = x.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    parts = [wide @ weight.float().T for weight in weights]
    whole = ACTIVATIONS[activation](parts[0]) * parts[1] if activation else torch.cat(parts, 1)
    if residual is not None:
        whole = whole + residual.float()
    return whole.to(x.dtype) if out is None else out.copy_(whole)


def nf4_gemv(x, operands, **around):
    return product(x, [nf4_weight(matrix, torch.float32) for matrix in operands], **around)


def nf4_gemm(x, matrix, **around):
    return product(x, [nf4_weight(matrix, torch.float32)], **around)


def dense_gemv(x, operands, **around):
    return product(x, [each.weight for each in operands], **around)


def int8_gemv(x, operands, **around):
    weights = [int8_format.dequantize(matrix, torch.float32) for matrix in operands]
    return product(x, weights, **around)


def int4_packed(matrix):
    order = matrix.order
    tiled = int4_codec.Packed(matrix.codes, matrix.scales, matrix.zeros, order, matrix.group, order is None)
    return int4_tiles.untile(tiled)


def int4_gemv(x, operands, **around):
    weights = [int4_codec.dequantize(int4_packed(each), torch.float32) for each in operands]
    return product(x, weights, **around)


def int4_dequantize(matrix, first, out):
    """Columns as they are packed."""
    return int4_codec.dequantize_rows(replace(int4_packed(matrix), order=None, in_order=True), first, out)


def gguf_packed(matrix):
    return gguf_codec.Packed(gguf_tiles.untile(matrix.blocks, matrix.type), matrix.type, matrix.places, matrix.factor)


def gguf_gemv(x, operands, **around):
    weights = [gguf_codec.dequantize(gguf_packed(each), torch.float32) for each in operands]
    return product(x, weights, **around)


def gguf_dequantize(matrix, first, out):
    """Columns as they are stored."""
    return gguf_codec.dequantize_rows(gguf_packed(replace(matrix, places=None)), first, out)


def scaled_gemv(x, operands, **around):
    return product(x, [scaled_operands.weight_of_tiles(each) for each in operands], **around)


def scaled_dequantize(matrix, first, out):
    return out.copy_(scaled_operands.weight_of_tiles(matrix)[first : first + len(out)])


def additive_dequantize(sets, scales, first, out, *, out_group=1, rounded):
    from localq.formats.codebooks.definition import dequantize_codes

    if rounded:
        codes, codebooks = sets[0].codes, sets[0].codebooks.unflatten(2, (out_group, sets[0].stride))
        return aqlm.dequantize_rows(aqlm.Packed(codes, codebooks, scales), first, out)
    total, rows = None, slice(first, first + len(out))
    for each in sets:
        length = each.codebooks.shape[2]
        total = dequantize_codes(each.codes[rows], each.codebooks, each.stride, length, out.shape[1], total)
    return out.copy_(total * scales[rows, None].float())


def vq_adjoint(matrix, codes, stride, length):
    return adjoint_operands.exact(matrix, codes, stride, length)[0].float()


def vptq_dequantize(matrix, first, out):
    return vptq_codec.dequantize_rows(matrix, first, len(out), out.dtype, out)


def gather_gemv(x, operands, **around):
    ones = [aqlm.Packed(each.codes, each.codebooks, torch.ones_like(each.scales)) for each in operands]
    weights = [aqlm.dequantize(one, torch.float32) for one in ones]
    scaled = [weight * each.scales.view(-1, 1).float() for weight, each in zip(weights, operands, strict=True)]
    return product(x, scaled, **around)


def vq_gemv(x, operands, norm=None, **around):
    signs = operands[0].signs
    if signs is not None:
        x, norm = rotation.rotate(x if norm is None else normed(x, norm, out=torch.empty_like(x)), signs), None
    around["norm"] = norm
    return product(x, [weights_of(each) for each in operands], **around)


def bcq_rows(matrix, first, count, dtype):
    codes = matrix.out_features, matrix.planes, matrix.in_features // 8
    scales = matrix.out_features, matrix.layers, matrix.groups
    packed = bcq_codec.Packed(
        bcq_tiles.untile_codes(matrix.codes.flatten(), codes, first, count),
        bcq_tiles.untile_scales(matrix.scales.flatten(), scales, matrix.planes, first, count),
    )
    return bcq_codec.dequantize(packed, dtype)


def bcq_gemv(x, operands, **around):
    return product(x, [bcq_rows(matrix, 0, matrix.out_features, torch.float32) for matrix in operands], **around)


def bcq_dequantize(matrix, first, out):
    return out.copy_(bcq_rows(matrix, first, len(out), out.dtype))


def vq_dequantize(matrix, codebooks, first, out, *, rounded):
    from localq.formats.codebooks.definition import dequantize_codes

    total, scales = None, matrix.scales[first : first + len(out), None]
    for book, codebook in zip(matrix.books, codebooks, strict=True):
        codes = codebook_tiles.untile(book.codes.flatten(), (matrix.out_features, book.tile_positions), first, len(out))
        codes = codes[:, book.before : book.before + matrix.in_features // book.stride, None]
        total = dequantize_codes(codes, codebook[None], book.stride, codebook.shape[1], matrix.in_features, total)
    return out.copy_(total.to(scales.dtype) * scales if rounded else total * scales.float())


def rotated(x, signs, out=None):
    turned = rotation.rotate(x, signs)
    return turned if out is None else out.copy_(turned)


def vptq_gemv(x, operands, **around):
    return product(x, [vptq_codec.dequantize(each, torch.float32) for each in operands], **around)


def embedded(ids, table, scale=1.0, out=None):
    rows = table[ids] * scale
    return rows if out is None else out.copy_(rows)


def normed(x, norm, residual=None, out=None):
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    if residual is not None:
        wide = wide.to(x.dtype).float() + residual.float()
    return out.copy_(wide)


def dry_matched(state, token):
    if int(state.step):
        state.history[int(state.prompt + state.step) - 1] = int(token)
    state.matches.copy_(sampler.repeated_lengths(state))


def adjusted(logits, state, *, softcap=0.0):
    capped = torch.tanh(logits / softcap) * softcap if softcap else logits
    logits.copy_(sampler.adjust(capped, state))
    state.matches.zero_()


def sampled(logits, state, *, greedy, softcap=0.0, adjusted=False, chosen, token, position=None):
    chosen.copy_(sampler.choose(logits, state, greedy) if adjusted else sampler.sample(logits, state, greedy))
    token.copy_(chosen)
    state.advance(token)
    if position is not None:
        position.add_(1)


def attention_decode(
    qkv,
    layer,
    position,
    *,
    heads,
    scale,
    workspace,
    rotary,
    q_norm,
    k_norm,
    softcap,
    window,
    sinks=None,
    base=None,
    q_stride=0,
    gate=None,
    out=None,
):
    """Without norms, rotation, cap, window and base. A cache of codes is read through `engine.kv_codec`."""
    from localq import kv_bits
    from localq.engine import kv_codec

    width, slot = layer.head_dim, int(position)
    behind = heads * (q_stride or width)
    q = qkv[0, :behind].view(heads, 1, -1)[..., :width].float()
    new = qkv[0, behind:].view(2, layer.kv_heads, width)
    read, kept = [], ((layer.k, layer.k_scales, new[0]), (layer.v, layer.v_scales, new[1]))
    for (stored, scales, part), bits in zip(kept, kv_bits.split(layer.bits), strict=True):
        if bits == 16:
            stored[:, slot] = part
            values = stored[:, : slot + 1].float()
        else:
            stored[:, slot], scales[:, slot] = kv_codec.quantize(part, bits)
            values = kv_codec.dequantize(stored[:, : slot + 1], scales[:, : slot + 1], bits, torch.float32)
        read.append(values.repeat_interleave(heads // layer.kv_heads, 0))
    scores = q @ read[0].transpose(-1, -2) * scale
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(heads, 1, 1).float()), -1)
    attended = torch.softmax(scores, -1)[..., : slot + 1] @ read[1]
    result = attended.reshape(1, -1).to(qkv.dtype)
    if gate is not None:
        result = torch.nn.functional.glu(torch.cat((result, gate.reshape(1, -1)), -1))
    return result if out is None else out.copy_(result)


def vq_search(targets, feedback, white, books, tails, beam):
    """One book, and as a beam of one would choose."""
    (book,), stride = books, white.shape[1]
    rest = torch.cat((targets, torch.zeros_like(tails)), 1)
    rest[:, : tails.shape[1]] -= tails
    codes, errors = [], torch.zeros_like(targets)
    for position, begin in enumerate(range(0, targets.shape[1], stride)):
        here = slice(begin, begin + stride)
        wanted, offered = rest[:, here] @ white[position], book.codewords[:, :stride] @ white[position]
        codes.append(torch.cdist(wanted, offered).argmin(1).to(torch.uint8))
        rest[:, begin : begin + book.length] -= book.codewords[codes[-1].long()]
        errors[:, here] = rest[:, here] @ white[position]
        later = slice(begin + stride, targets.shape[1])
        rest[:, later] -= errors[:, here] @ feedback[here, later]
    tails.copy_(-rest[:, targets.shape[1] :])
    return [torch.stack(codes, 1)], errors


def delta_decoded(inputs, gates, x, norm, write, decay, weights, columns, matrix, workspace, out=None):
    """`kernels.delta_net.delta_decode`."""
    token = delta_nets.DeltaCase(weights, inputs, gates, write, decay, columns, matrix)
    return _taken(token, delta_nets.StepCase(token, x, norm, write, decay).expected(), out)


def _taken(case, expected, out):
    result, columns, matrix = expected
    case.columns.copy_(columns)
    case.matrix.copy_(matrix)
    return (torch.empty_like(case.gates) if out is None else out).copy_(result)


def delta_verified(
    inputs, gates, x, norm, write, decay, weights, columns, matrix, drafted, position, workspace, out=None
):
    """`kernels.delta_net.delta_verify`."""
    count = max(0, min(int(position - workspace.first_drafted), len(drafted[0])))
    if count:
        kept_inputs, kept_decay, kept_beta = (part[:count] for part in drafted)
        heads = gates.new_zeros(count, gates.shape[1])
        replayed = delta_nets.DeltaCase(weights, kept_inputs, heads, None, None, columns, matrix)
        _taken(replayed, delta_nets.after(replayed, kept_beta.double(), kept_decay.double().exp()), None)
    token = delta_nets.DeltaCase(weights, inputs, gates, write, decay, columns.clone(), matrix.clone())
    case = delta_nets.StepCase(token, x, norm, write, decay)
    found = case.expected()
    first = delta_nets.StepCase(replace(token, inputs=inputs[:1], gates=gates[:1]), x[:1], norm, write, decay)
    _taken(delta_nets.DeltaCase(weights, inputs, gates, write, decay, columns, matrix), first.expected(), None)
    normed = x.double() * (x.double().square().mean(1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    beta = torch.sigmoid(normed @ write.double().T)
    kept_decay = weights.rates.double() * F.softplus(normed @ decay.double().T + weights.offsets.double())
    for part, given in zip(drafted, (inputs, kept_decay, beta), strict=True):
        part[: len(x) - 1] = given[1:]
    return _taken(token, found, out)


def delta_prefilled(inputs, gates, write, decay, weights, columns, matrix, workspace=None, out=None):
    """`kernels.delta_net.delta_prefill`."""
    case = delta_nets.DeltaCase(weights, inputs, gates, write, decay, columns, matrix)
    return _taken(case, delta_nets.expected(case), out)
