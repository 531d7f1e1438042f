"""Decode attention and the quantized KV cache on the GPU: checks of tensors, then the kernels.

All work under CUDA graph capture; `attention_decode` and `kv_write` read positions from device memory. The stored form
of 8 and 4 bit is defined in `engine.kv_codec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kernels, kv_bits
from localq.kernels.checks import HALF_TYPES, TYPES, addresses, check, check_cuda, place
from localq.kernels.gemv import Norm
from localq.kv_bits import KV_BITS, KvBits

MOST_PER_GROUP = 16  # query heads of one kv head
MOST_COLUMNS = 512  # of a head in 16 bit

Shape = tuple[int, int, int]  # heads, KV heads, columns of a head


@dataclass(frozen=True)
class KVLayer:
    """One layer's cache. Slot s of kv head h holds position s, or that of a window that slides (`base`).

    k, v                 16 bit: T [kv_heads, capacity, head_dim]; else u8 [kv_heads, capacity, head_dim * bits / 8],
                         with the bits of each where `bits` is `kv_bits.K8V4`
    k_scales, v_scales   f16 [kv_heads, capacity, scales of a vector]; None for 16 bit
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    bits: KvBits
    head_dim: int

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.k.shape[0]

    @property
    def capacity(self) -> int:
        """Slots."""
        return self.k.shape[1]

    def bytes_per_slot(self) -> int:
        """Bytes of one position: k and v of all kv heads, their scales included."""
        tensors = [each for each in (self.k, self.v, self.k_scales, self.v_scales) if each is not None]
        return sum(each.nbytes for each in tensors) // self.capacity


class AttentionWorkspace:
    """Memory through which the blocks of a launch exchange data: allocated once, shared by all layers of a stream.

    rows   consecutive tokens of a launch, at most
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        rows: int = 1,
        memory: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """memory: `partials` and `arrived` of several workspaces; None: they are allocated."""
        self.shape, self.rows = (heads, kv_heads, head_dim), rows
        self.splits, *self._more_splits = _splits(kv_heads, device, rows)
        self.partials, self.arrived = memory or _memory([self.shape], device, rows)

    def splits_of(self, rows: int) -> int:
        """Blocks per kv head and row of a launch of `rows` rows, at most."""
        return self.splits if rows == 1 else self._more_splits[rows - 2]

    def bytes(self) -> int:
        """Bytes allocated."""
        return self.partials.nbytes + self.arrived.nbytes


def _splits(kv_heads: int, device: torch.device, rows: int) -> list[int]:
    """Blocks per kv head and row of launches of 1 to `rows` rows, at most."""
    module = kernels.module()
    return [module.attention_splits(kv_heads * count, device.index or 0) for count in range(1, rows + 1)]


def _memory(shapes: Sequence[Shape], device: torch.device, rows: int) -> tuple[Tensor, Tensor]:
    """`partials` and `arrived` with room for each of `shapes`."""
    module = kernels.module()
    floats = [
        count * module.attention_partials(*shape, splits)
        for shape in shapes
        for count, splits in enumerate(_splits(shape[1], device, rows), 1)
    ]
    arrived = torch.zeros(rows * 16 * max(kv_heads for _, kv_heads, _ in shapes), dtype=torch.int32, device=device)
    return torch.empty(max(floats), dtype=torch.float32, device=device), arrived


def workspaces(shapes: Sequence[Shape], device: torch.device, rows: int) -> dict[Shape, AttentionWorkspace]:
    """Workspaces of layers whose heads differ, by shape, in one memory: layers run one behind the other."""
    memory = _memory(shapes, device, rows)
    return {shape: AttentionWorkspace(*shape, device, rows, memory) for shape in shapes}


def why_not(heads: int, kv_heads: int, head_dim: int, most: int = kv_bits.MOST_CODED_COLUMNS) -> str:
    """Return why the kernels cannot serve heads of this shape, of up to `most` columns; empty if they can."""
    if head_dim % 8 or not 8 <= head_dim <= most:
        return f"no attention kernel supports head_dim {head_dim} (must be a multiple of 8, up to {most})"
    if heads % kv_heads or heads // kv_heads > MOST_PER_GROUP:
        return (
            f"no attention kernel supports {heads} heads and {kv_heads} KV heads "
            f"(at most {MOST_PER_GROUP} heads per KV head)"
        )
    return ""


def attention_decode(
    qkv: Tensor,
    layer: KVLayer,
    position: Tensor,
    *,
    heads: int,
    rotary: Tensor | None,
    q_norm: Norm | None,
    k_norm: Norm | None,
    scale: float,
    softcap: float,
    window: int,
    workspace: AttentionWorkspace,
    sinks: Tensor | None = None,
    base: Tensor | None = None,
    q_stride: int = 0,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The attention of some consecutive tokens, and the write of their k and v -> T [rows, heads * head_dim].

    qkv       T [1 to 8 rows, heads * q_stride + 2 * kv_heads * head_dim]: q, k, v behind each other, not yet rotated
    position  i64 [1] on the device, of the first row; of each below the length of `rotary`, less `base` the capacity
    rotary    T [ctx, 2, rotary_dim] as `models.rope.Rope.table` makes it, or None
    window    slots that are seen, the token's own included; 0 = all. softcap: c * tanh(score / c), 0 = none
    sinks     T [heads]: one more score in each head's softmax, uncapped, whose weight multiplies nothing; or None
    base      i64 [1] on the device: the position of slot 0, which no running step changes; None = 0
    q_stride  elements from q of a head to that of the next, a multiple of 8; 0 = head_dim: they lie beside each other
    gate      T [heads, head_dim], of several rows [rows, heads, head_dim], whose heads may lie apart, in qkv too; its
              sigmoid multiplies what the heads gather, which is rounded before; None = there is none

    One launch for one row, else two. Later slots are never read. Sums in f32, weights rounded to 16 bit; the same bits.
    """
    op, width, rows = "attention_decode", layer.head_dim, qkv.shape[0]
    q_stride = q_stride or width
    _check_call(op, qkv, layer, position, heads, q_stride, rotary, workspace)
    if out is None:
        out = torch.empty(rows, heads * width, dtype=qkv.dtype, device=qkv.device)
    check(op, "out", out, qkv.device, (qkv.dtype,), rows * heads * width)
    _check_options(op, qkv, (rows, heads, width), sinks, base, gate)
    check_cuda(op, "qkv", qkv)
    kernels.module().attention_decode(
        layer=_arguments(layer),
        heads=heads,
        q_stride=q_stride,
        **_gate_strides(gate),
        rotary_dim=0 if rotary is None else rotary.shape[2],
        q_norm=_norm(op, "q_norm weight", q_norm, qkv, width),
        k_norm=_norm(op, "k_norm weight", k_norm, qkv, width),
        scale=scale,
        softcap=softcap,
        window=window,
        splits=workspace.splits_of(rows),
        rows=rows,
        type=TYPES[qkv.dtype],
        **addresses(qkv=qkv, position=position, base=base, gate=gate, rotary=rotary, sinks=sinks, out=out),
        **addresses(partials=workspace.partials, arrived=workspace.arrived),
        **place(qkv),
    )
    return out


def _gate_strides(gate: Tensor | None) -> dict[str, int]:
    if gate is None:
        return {"gate_stride": 0, "gate_row_stride": 0}
    return {"gate_stride": gate.stride(-2), "gate_row_stride": gate.stride(0) if gate.dim() == 3 else 0}


def _check_call(
    op: str,
    qkv: Tensor,
    layer: KVLayer,
    position: Tensor,
    heads: int,
    q_stride: int,
    rotary: Tensor | None,
    workspace: AttentionWorkspace,
) -> None:
    """ValueError where the operands of `attention_decode` do not belong together."""
    width, device = layer.head_dim, qkv.device
    if reason := why_not(heads, layer.kv_heads, width, MOST_COLUMNS):
        raise ValueError(f"{op}: {reason}")
    if workspace.shape != (heads, layer.kv_heads, width):
        raise ValueError(f"{op}: workspace is for {workspace.shape}, must be for {(heads, layer.kv_heads, width)}")
    if q_stride < width or q_stride % 8:
        raise ValueError(f"{op}: q_stride = {q_stride}, must be a multiple of 8, at least head_dim ({width})")
    rows = qkv.shape[0]
    if qkv.dim() != 2 or not 1 <= rows <= workspace.rows:
        raise ValueError(f"{op}: qkv has shape {tuple(qkv.shape)}, must have 1 to {workspace.rows} rows")
    check(op, "qkv", qkv, device, HALF_TYPES, rows * (heads * q_stride + 2 * layer.kv_heads * width))
    _check_layer(op, layer, device, qkv.dtype)
    check(op, "position", position, device, (torch.int64,), 1)
    check(op, "partials", workspace.partials, device, (torch.float32,), workspace.partials.numel())
    if rotary is None:
        return
    if rotary.dim() != 3 or rotary.shape[1] != 2:
        raise ValueError(f"{op}: rotary has shape {tuple(rotary.shape)}, must be [ctx, 2, rotary_dim]")
    check(op, "rotary", rotary, device, (qkv.dtype,), rotary.numel())


def _check_options(
    op: str, qkv: Tensor, shape: tuple[int, int, int], sinks: Tensor | None, base: Tensor | None, gate: Tensor | None
) -> None:
    """Raise ValueError for bad optional operands of `attention_decode`. shape: rows, heads, head_dim."""
    for name, operand, dtype, count in (("sinks", sinks, qkv.dtype, shape[1]), ("base", base, torch.int64, 1)):
        if operand is not None:
            check(op, name, operand, qkv.device, (dtype,), count)
    if gate is None:
        return
    if gate.dtype != qkv.dtype or gate.device != qkv.device:
        raise ValueError(f"{op}: gate is {gate.dtype} on {gate.device}, must be {qkv.dtype} on {qkv.device}")
    wanted = shape[1:] if shape[0] == 1 else shape
    if tuple(gate.shape) != wanted:
        raise ValueError(f"{op}: gate has shape {tuple(gate.shape)}, must be {wanted}")
    *row, apart, within = gate.stride()
    if within != 1 or apart < shape[2] or apart % 4 or any(each % 4 for each in row):
        raise ValueError(f"{op}: gate has strides {gate.stride()}, must be (4 n, 1) with 4 n at least {shape[2]}")


def attention_decode_bytes(layer: KVLayer, heads: int, live: int, gated: bool = False, rows: int = 1) -> int:
    """Bytes that `attention_decode` must move for `live` visible slots, those of its rows included: each slot once (the
    own are written instead of read), qkv, a gate where it is `gated`, and the result once."""
    width = layer.head_dim * 2
    return live * layer.bytes_per_slot() + rows * (2 * heads + 2 * layer.kv_heads + heads * gated) * width


def kv_write(layer: KVLayer, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Stores k, v T [tokens, kv_heads, head_dim] at `slots` i64 [tokens], quantized (all `bits` but 16).

    Tokens may lie apart (parts of a fused projection); what belongs to one token must be contiguous.
    """
    op = "kv_write"
    device, shape = k.device, (slots.numel(), layer.kv_heads, layer.head_dim)
    _check_layer(op, layer, device, k.dtype)
    check(op, "slots", slots, device, (torch.int64,), slots.numel())
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype not in HALF_TYPES or tensor.dtype != k.dtype or tensor.device != device:
            raise ValueError(f"{op}: {name} is {tensor.dtype} on {tensor.device}, must be float16 or bfloat16")
        if tuple(tensor.shape) != shape or tensor.stride()[1:] != (layer.head_dim, 1):
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}, not {shape}")
    check_cuda(op, "k and v", k)
    kernels.module().kv_write(
        layer=_arguments(layer),
        k=k.data_ptr(),
        v=v.data_ptr(),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        slots=slots.data_ptr(),
        tokens=slots.numel(),
        type=TYPES[k.dtype],
        **place(k),
    )


def kv_read(layer: KVLayer, k: Tensor, v: Tensor) -> None:
    """Fills k, v T [kv_heads, live, head_dim] with the first `live` slots, dequantized (all `bits` but 16)."""
    op = "kv_read"
    live = k.shape[1]
    count = layer.kv_heads * live * layer.head_dim
    check(op, "k", k, layer.k.device, HALF_TYPES, count)
    check(op, "v", v, layer.k.device, (k.dtype,), count)
    _check_layer(op, layer, k.device, k.dtype)
    check_cuda(op, "k and v", k)
    kernels.module().kv_read(
        layer=_arguments(layer), k=k.data_ptr(), v=v.data_ptr(), live=live, type=TYPES[k.dtype], **place(k)
    )


def kv_write_bytes(layer: KVLayer, tokens: int) -> int:
    """Bytes that `kv_write` must move: 16-bit values in, the stored form out."""
    return tokens * (layer.bytes_per_slot() + 4 * layer.kv_heads * layer.head_dim)


def kv_read_bytes(layer: KVLayer, live: int) -> int:
    """Bytes that `kv_read` must move: as `kv_write_bytes`, the other way round."""
    return kv_write_bytes(layer, live)


def _check_layer(op: str, layer: KVLayer, device: torch.device, dtype: torch.dtype) -> None:
    if layer.bits not in KV_BITS:
        raise ValueError(f"{op}: bits = {layer.bits}, must be one of {KV_BITS}")
    vectors, (key_bits, value_bits) = layer.kv_heads * layer.capacity, kv_bits.split(layer.bits)
    parts = (("k", layer.k, layer.k_scales, key_bits), ("v", layer.v, layer.v_scales, value_bits))
    for name, codes, scales, bits in parts:
        if bits == 16:
            check(op, f"{name} of the layer", codes, device, (dtype,), vectors * layer.head_dim)
            continue
        check(op, f"{name} of the layer", codes, device, (torch.uint8,), vectors * layer.head_dim * bits // 8)
        if scales is None:
            raise ValueError(f"{op}: {name}_scales is None, must be given with {bits} bits")
        check(op, f"{name}_scales", scales, device, (torch.float16,), vectors * kv_bits.scale_count(layer.head_dim))


def _norm(op: str, name: str, norm: Norm | None, qkv: Tensor, width: int) -> tuple[int, int, float]:
    if norm is None:
        return 0, 0, 0.0
    check(op, name, norm.weight, qkv.device, (qkv.dtype, torch.float32), width)
    return 1 + (norm.weight.dtype == torch.float32), norm.weight.data_ptr(), norm.eps


def _arguments(layer: KVLayer) -> tuple[int, ...]:
    """The layer as csrc/attention/bind.cpp takes it."""
    k_scales = 0 if layer.k_scales is None else layer.k_scales.data_ptr()
    v_scales = 0 if layer.v_scales is None else layer.v_scales.data_ptr()
    return (
        layer.k.data_ptr(), layer.v.data_ptr(), k_scales, v_scales,
        *kv_bits.split(layer.bits), layer.kv_heads, layer.head_dim, layer.capacity,
    )  # fmt: skip
