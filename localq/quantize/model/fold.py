"""Rotations that remove outliers from the weights and fold into them, at no cost at run time.

A codebook fits weights best that look like noise. Three rotations make them so, and a product with its transpose
elsewhere undoes each (QuaRot, Ashkboos et al. 2024, sections 3 and 4):

stream   Q [hidden, hidden] of the residual stream: the embedding and everything added to the stream is written in the
         rotated basis, everything that reads it is multiplied with Q. RMSNorm commutes with a rotation once its own
         weights are folded into the matrices after it.
values   one of a head's width for every key/value head: the rows of v and the columns of o; attention mixes tokens,
         not channels. Not where a gate multiplies the channels in between.
inputs   of the down projection: after a nonlinearity, so it is applied at run time (formats/codebooks/rotation.py).

The first needs norms only in front of matrices: families with norms after them (gemma) keep their stream, and rotate
inputs at run time. Q is a random orthogonal matrix of hidden/p rows, times (Kronecker) a Hadamard matrix of p, with
random signs; p is the largest power of two that divides hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from localq.formats.codebooks import rotation
from localq.models.attention import Attention
from localq.models.decoder import Block, Decoder
from localq.models.layers import GatedMLP, RecurrentMixer, RMSNorm
from localq.models.unstacked_experts import UnstackedMixture


def can_rotate_stream(model: Decoder) -> bool:
    """True where the stream can be rotated: norms after attention or the MLP forbid it."""
    norms = [block.norms() for block in model.layers if isinstance(block, Block)]
    return all(each.after_attention is None and each.after_mlp is None for each in norms)


def random_rotation(width: int, seed: int) -> Tensor:
    """Return Q f64 [width, width], orthogonal, determined by the seed."""
    power = width & -width
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(width // power, width // power, generator=generator, dtype=torch.float64)
    mixed, triangle = torch.linalg.qr(noise)
    mixed = (mixed * triangle.diagonal().sign()).contiguous()  # column-major as it comes
    signs = torch.randint(0, 2, (width,), generator=generator).double() * 2 - 1
    return torch.kron(mixed, _sylvester(power)) * signs


def minus_signs(columns: int, seed: int) -> Tensor:
    """Return random signs for the rotation of an input, u8 [columns / 8] as `rotation.packed_signs` packs them."""
    return rotation.packed_signs(torch.randint(0, 2, (columns,), generator=torch.Generator().manual_seed(seed)).bool())


def fold_block(block: Block, turn: Tensor | None, seed: int) -> None:
    """Rotate the weights of a block of plain linears in place; turn: Q of the stream on its device, or None."""
    mixer, mlp, norms = block.mixer(), block.mlp, block.norms()
    if isinstance(mixer, Attention) and not mixer.is_gated:
        _fold_values(mixer, seed)
    if turn is None:
        return
    readers_of_mlp, writers = _ends_of(mlp)
    assert isinstance(mixer, Attention | RecurrentMixer)
    assert norms.before_attention is not None  # as in all blocks whose stream can be rotated
    assert norms.before_mlp is not None
    for norm, readers in ((norms.before_attention, mixer.inputs()), (norms.before_mlp, readers_of_mlp)):
        for reader in readers:
            _rotate_reader(plain_linear(reader), norm.factor, turn)
        _reset(norm)
    for writer in (mixer.get_submodule(mixer.output), *writers):
        _write(plain_linear(writer), turn)


def _ends_of(mlp: nn.Module) -> tuple[Sequence[nn.Module], Sequence[nn.Module]]:
    """Return the linears that read the stream in an MLP, and those that write it."""
    if isinstance(mlp, UnstackedMixture):
        return mlp.readers(), mlp.writers()
    assert isinstance(mlp, GatedMLP)
    return mlp.inputs(), (mlp.down_proj,)


def rotate_rows(rows: Tensor, turn: Tensor) -> Tensor:
    """Rotate rows [n, hidden] of the embedding, or of a head with its norm folded in; f32."""
    return _times(rows, turn)


def _fold_values(attention: Attention, seed: int) -> None:
    """Rotate v and o by a rotation of a head's width for every key/value head."""
    width, heads, kv_heads = attention.head_dim, attention.heads, attention.kv_heads
    last = plain_linear(attention.inputs()[-1])  # v, or q, k and v behind each other
    weight, out = last.weight.data, attention.o_proj.weight.data
    rotations = torch.stack([random_rotation(width, seed * kv_heads + head) for head in range(kv_heads)]).to(
        weight.device
    )
    rows = weight[-kv_heads * width :].double().view(kv_heads, width, -1)
    weight[-kv_heads * width :] = (rotations @ rows).reshape(kv_heads * width, -1).to(weight.dtype)
    if last.bias is not None:
        bias = last.bias.data[-kv_heads * width :].double().view(kv_heads, width, 1)
        last.bias.data[-kv_heads * width :] = (rotations @ bias).flatten().to(weight.dtype)
    columns = out.double().view(-1, kv_heads, heads // kv_heads, width)
    rotated = torch.einsum("rkgd,ked->rkge", columns, rotations)
    attention.o_proj.weight.data = rotated.reshape(out.shape).to(out.dtype)


def plain_linear(module: nn.Module) -> nn.Linear:
    """Return `module`, a linear with plain weights; raises TypeError for others."""
    if not isinstance(module, nn.Linear):
        raise TypeError(f"{type(module).__name__} is no plain linear")
    return module


def _rotate_reader(reader: nn.Linear, norm: Tensor, turn: Tensor) -> None:
    """Rotate a linear that reads the normed stream, with the norm folded in."""
    reader.weight.data = _times(reader.weight.data.float() * norm.float(), turn).to(reader.weight.dtype)


def _write(writer: nn.Linear, turn: Tensor) -> None:
    """Rotate a linear that is added to the stream."""
    dtype = writer.weight.dtype
    writer.weight.data = _times(writer.weight.data.T, turn).T.contiguous().to(dtype)
    if writer.bias is not None:
        writer.bias.data = _times(writer.bias.data[None], turn)[0].to(dtype)


def _times(rows: Tensor, turn: Tensor) -> Tensor:
    """Return rows @ turn, computed in the dtype of `turn` some rows at a time; f32."""
    return torch.cat([(part.to(turn.dtype) @ turn).float() for part in torch.split(rows, 2**14)])


def _reset(norm: RMSNorm) -> None:
    norm.weight.data = torch.full_like(norm.weight.data, norm.neutral)
    norm.finish()


def _sylvester(size: int) -> Tensor:
    """Return the normalized Hadamard matrix of a power of two, f64."""
    ones = torch.ones(1, 1, dtype=torch.float64)
    while len(ones) < size:
        ones = torch.cat((torch.cat((ones, ones), 1), torch.cat((ones, -ones), 1)))
    return ones.mul_(size**-0.5)
