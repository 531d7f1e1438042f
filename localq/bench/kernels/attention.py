"""Rows of decode attention at several depths and cache widths, beside torch's attention over a 16-bit cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from localq import kv_bits
from localq.bench.kernels.shapes import Heads, Workload
from localq.bench.kernels.table import Rival, Row
from localq.bench.kernels.timing import SEED, Bench, check, clones, type_name, wrong
from localq.engine.cache import KVCache
from localq.files.layer_caches import KeysAndValues
from localq.kernels import attention
from localq.kv_bits import KV_BITS, KvBits

DEPTHS = (128, 4096, 32768)
FILL = 4096  # positions that are written at a time
TOKENS = 1024  # of a prefill chunk
TORCH = "torch attention"
# Relative error that normal numbers may have in the stored form: steps of 2/254 and 2/15 of a block's largest value,
# which is rarely above 4 deviations.
STORED_ERROR = {8: 0.01, 4: 0.16}


def cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """Return the rows to measure for `work`, one callable each."""
    attended: list[Callable[[Bench], Row]] = [
        partial(attention_row, heads=heads, depth=depth, bits=bits, dtype=torch.float16)
        for heads in work.attention
        for depth in DEPTHS
        for bits in KV_BITS
    ]
    moved: list[Callable[[Bench], Row]] = [
        partial(row, heads=heads, bits=bits, dtype=torch.float16)
        for heads in work.attention[:1]
        for bits in KV_BITS[1:]
        for row in (kv_write_row, kv_read_row)
    ]
    return attended + moved


def attention_row(bench: Bench, heads: Heads, depth: int, bits: KvBits, dtype: torch.dtype) -> Row:
    """One `attention_decode` of the token at `depth` - 1, checked and timed; without norms and rotation."""
    per_layer = heads.kv_heads * heads.head_dim * depth * sum(kv_bits.split(bits)) // 8
    count = bench.copies(per_layer)
    cache = KVCache([KeysAndValues(heads.kv_heads, heads.head_dim)] * count, depth, dtype, bench.device, bits)
    for layer in range(count):
        _fill(bench, cache, layer, heads, depth, dtype)
    stride = heads.head_dim * (2 if heads.gated else 1)
    qkv = bench.normal(1, heads.heads * stride + 2 * heads.kv_heads * heads.head_dim, dtype=dtype)
    q, gate = qkv[0, : heads.heads * stride].view(heads.heads, stride).tensor_split([heads.head_dim], 1)
    position = torch.tensor([depth - 1], device=bench.device)
    workspace = attention.AttentionWorkspace(heads.heads, heads.kv_heads, heads.head_dim, bench.device)
    out = torch.empty(1, heads.heads * heads.head_dim, dtype=dtype, device=bench.device)

    def attend(layer: attention.KVLayer) -> Tensor:
        return attention.attention_decode(
            qkv, layer, position, heads=heads.heads, rotary=None, q_norm=None, k_norm=None,
            scale=heads.head_dim**-0.5, softcap=0.0, window=0, workspace=workspace, q_stride=stride,
            gate=gate if heads.gated else None, out=out,
        )  # fmt: skip

    def opened(gathered: Tensor) -> Tensor:
        return gathered.view(1, -1) * (torch.sigmoid(gate.to(gathered.dtype).reshape(1, -1)) if heads.gated else 1)

    what = f"{heads.name}, depth {depth}, {kv_bits.text(bits)}"
    measured = cache.layer(0)
    got = attend(measured).clone()
    keys, values = _stored(cache, heads, qkv, depth)
    q = q.reshape(1, heads.heads, 1, heads.head_dim)
    exact = opened(_torch_attention(q.double(), keys.double(), values.double()))
    check("attention_decode", what, got, exact, opened(_naive_attention(q, keys, values)))
    timing = bench.time([partial(attend, cache.layer(index)) for index in range(count)])
    moved = attention.attention_decode_bytes(measured, heads.heads, depth, heads.gated)
    rivals = (_torch(bench, q, keys, values),) if bits == KV_BITS[0] else ()
    return Row("attention", "attention_decode", what, 1, type_name(dtype), moved, timing, rivals)


def _fill(bench: Bench, cache: KVCache, layer: int, heads: Heads, depth: int, dtype: torch.dtype) -> None:
    """All positions but the last; in all but 16 bit this is `kv_write`."""
    for start in range(0, depth - 1, FILL):
        stop = min(start + FILL, depth - 1)
        shape = (stop - start, heads.kv_heads, heads.head_dim)
        k, v = (bench.normal(*shape, dtype=dtype, seed=SEED + start + offset) for offset in (1, 2))
        cache.update(layer, k, v, torch.arange(start, stop, device=bench.device), stop)


def _stored(cache: KVCache, heads: Heads, qkv: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """k, v [1, kv_heads, depth, head_dim] of layer 0 as they are stored, the last position included (`kv_read`)."""
    new = qkv[0, -2 * heads.kv_heads * heads.head_dim :].view(2, 1, heads.kv_heads, heads.head_dim)
    position = torch.tensor([depth - 1], device=qkv.device)
    k, v = cache.update(0, new[0], new[1], position, depth)
    return k.unsqueeze(0).clone(), v.unsqueeze(0).clone()


def _torch_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[1, heads, 1, head_dim]; heads share keys in groups."""
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def _naive_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The same with scores and weights rounded to the type of q."""
    group = q.shape[1] // keys.shape[1]
    scores = q @ keys.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(scores, -1) @ values.repeat_interleave(group, 1)


def kv_write_row(bench: Bench, heads: Heads, bits: KvBits, dtype: torch.dtype) -> Row:
    """One `kv_write` of a prefill chunk; checked by what is read back being near what was written."""
    cache, k, v = _chunk(bench, heads, bits, dtype)
    positions = torch.arange(TOKENS, device=bench.device)
    layers = [cache.layer(index) for index in range(len(k))]
    attention.kv_write(layers[0], k[0], v[0], positions)
    _check_stored(layers[0], k[0], v[0], heads, bits)
    launches = [partial(attention.kv_write, *each, positions) for each in zip(layers, k, v, strict=True)]
    moved = attention.kv_write_bytes(layers[0], TOKENS)
    what = f"{heads.name}, {TOKENS} tokens, {kv_bits.text(bits)}"
    return Row("attention", "kv_write", what, TOKENS, type_name(dtype), moved, bench.time(launches))


def kv_read_row(bench: Bench, heads: Heads, bits: KvBits, dtype: torch.dtype) -> Row:
    """One `kv_read` of as many slots, checked in the same way."""
    cache, k, v = _chunk(bench, heads, bits, dtype)
    positions = torch.arange(TOKENS, device=bench.device)
    layers = [cache.layer(index) for index in range(len(k))]
    for layer, keys, values in zip(layers, k, v, strict=True):
        attention.kv_write(layer, keys, values, positions)
    _check_stored(layers[0], k[0], v[0], heads, bits)
    results = [torch.empty(2, heads.kv_heads, TOKENS, heads.head_dim, dtype=dtype, device=bench.device) for _ in k]
    launches = [partial(attention.kv_read, layer, out[0], out[1]) for layer, out in zip(layers, results, strict=True)]
    moved = attention.kv_read_bytes(layers[0], TOKENS)
    what = f"{heads.name}, {TOKENS} slots, {kv_bits.text(bits)}"
    return Row("attention", "kv_read", what, TOKENS, type_name(dtype), moved, bench.time(launches))


def _chunk(bench: Bench, heads: Heads, bits: KvBits, dtype: torch.dtype) -> tuple[KVCache, list[Tensor], list[Tensor]]:
    """A cache of cold layers, and k, v T [tokens, kv_heads, head_dim] for each."""
    shape = (TOKENS, heads.kv_heads, heads.head_dim)
    count = bench.copies(2 * TOKENS * heads.kv_heads * heads.head_dim * dtype.itemsize)
    cache = KVCache([KeysAndValues(heads.kv_heads, heads.head_dim)] * count, TOKENS, dtype, bench.device, bits)
    k, v = (list(clones(bench.normal(*shape, dtype=dtype, seed=SEED + part), count)) for part in (1, 2))
    return cache, k, v


def _check_stored(layer: attention.KVLayer, k: Tensor, v: Tensor, heads: Heads, bits: KvBits) -> None:
    """The root mean square error of the stored form, relative to what was stored."""
    read = [torch.empty(heads.kv_heads, TOKENS, heads.head_dim, dtype=k.dtype, device=k.device) for _ in range(2)]
    attention.kv_read(layer, *read)
    for name, got, given, part in zip("kv", read, (k, v), kv_bits.split(bits), strict=True):
        written = given.transpose(0, 1).float()
        error = ((got.float() - written).square().mean() / written.square().mean()).sqrt().item()
        if not error <= STORED_ERROR[part]:
            raise wrong("kv_write", f"{name} in {part} bit", f"the relative error is {error:.3g}")


def _torch(bench: Bench, q: Tensor, keys: Tensor, values: Tensor) -> Rival:
    count = bench.copies(keys.nbytes + values.nbytes)
    pairs = zip(clones(keys, count), clones(values, count), strict=True)
    return bench.rival(TORCH, [partial(_torch_attention, q, k, v) for k, v in pairs])
