"""What the self-test computes: every kernel on small, odd shapes, against the reference on the CPU.

Bounds follow from the arithmetic: a result may differ from fp64 by the roundings of its inputs and of itself, so by a
few units of the last place of the sum of magnitudes. Anything worse is a wrong table, lane or index, not rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.engine import sampler
from localq.engine import selftest_bcq as binary
from localq.engine import selftest_books as books
from localq.engine import selftest_experts as mixtures
from localq.engine import selftest_int4 as int4s
from localq.engine import selftest_replies as replies
from localq.engine import selftest_rowlut as rowluts
from localq.engine import selftest_search as searches
from localq.engine.cache import KVCache
from localq.engine.sampler import SamplerState
from localq.engine.selftest import Mismatch
from localq.kernels import (
    adjust,
    attention,
    dense,
    embed,
    gather,
    hadamard,
    int4,
    int8,
    nf4,
    rmsnorm,
    sampling,
    unpack,
    vq,
    vq_dequantize,
)
from localq.kernels.gemv import Norm
from localq.kernels.int4 import Int4Matrix
from localq.kernels.int8 import Int8Matrix
from localq.kernels.nf4 import Nf4Matrix
from localq.kernels.unpack import CodeSet
from localq.quant import aqlm, nf4_tiles, vptq_codec, vq2_codec
from localq.quant import hadamard as rotation
from localq.quant import int8 as int8_format
from localq.quant import nf4 as nf4_format
from localq.quant.nf4 import Packed
from localq.sampling import Sampling

OUT, COLUMNS = 83, 640  # tiles of 16 rows and a rest; a whole chunk of 8 blocks and a rest
ROUNDINGS = 3  # of inputs and result, in units of the last place of the sum of magnitudes
EPS = 1e-5
HALF = torch.float16


def _normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _near(got: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """|got - exact| within the roundings of 16 bit; all on the CPU, exact and magnitude in fp64."""
    error = (got.cpu().double() - exact).abs()
    allowed = ROUNDINGS * torch.finfo(HALF).eps * magnitude + 1e-6
    if not bool((error <= allowed).all()):
        worst = int((error / allowed).nan_to_num(torch.inf).argmax())
        raise Mismatch(f"element {worst} is off by {float(error.flatten()[worst]):.3g}")


def _same(got: Tensor, expected: Tensor) -> None:
    if not torch.equal(got.cpu(), expected):
        raise Mismatch("the result differs from the reference")


def _near_product(got: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """got = residual + x weight^T; weight f32 [out, in] on the CPU."""
    exact, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if residual is not None:
        exact, magnitude = exact + residual.double(), magnitude + residual.double().abs()
    _near(got, exact, magnitude)


def _nf4(device: torch.device, tiled: bool, seed: int = 1) -> tuple[Nf4Matrix, Tensor]:
    """A matrix of random codes and scales on the device, and its weights f32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    blocks = OUT * COLUMNS // nf4.BLOCK
    codes = torch.randint(256, (OUT, COLUMNS // 2), dtype=torch.uint8, generator=generator)
    absmax = torch.randint(256, (blocks,), dtype=torch.uint8, generator=generator)
    nested_absmax = 0.5 + torch.rand(-(-blocks // nf4.NESTED_BLOCK), generator=generator)
    nested_map, offset = nf4_format.dynamic_map(), torch.tensor(1.25)
    packed = Packed(codes, absmax, nested_absmax, nested_map, offset, (OUT, COLUMNS), torch.float32)
    if tiled:
        codes, absmax = nf4_tiles.tile(codes, absmax, packed.shape)
    matrix = Nf4Matrix(
        codes.to(device), absmax.to(device), nested_absmax.to(device), nested_map.to(device), offset.item(),
        nf4_format.CODE_MAP.to(device), OUT, COLUMNS, tiled,
    )  # fmt: skip
    return matrix, nf4_format.dequantize(packed, torch.float32)


def _nf4_dequantize(device: torch.device) -> None:
    for tiled in (False, True):
        matrix, weight = _nf4(device, tiled)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            _same(nf4.nf4_dequantize(matrix, dtype), weight.to(dtype))


def _nf4_gemv(device: torch.device) -> None:
    x = _normal(8, COLUMNS).to(HALF)
    for tiled in (False, True):
        matrix, weight = _nf4(device, tiled)
        for rows in (1, 3, 8):
            _near_product(nf4.nf4_gemv(x[:rows].to(device), [matrix]), x[:rows], weight)
    residual = _normal(1, OUT, seed=2).to(HALF)
    got = nf4.nf4_gemv(x[:1].to(device), [matrix], residual=residual.to(device))
    _near_product(got, x[:1], weight, residual)
    second, up = _nf4(device, True, seed=2)
    second = replace(second, code_map=matrix.code_map, nested_map=matrix.nested_map)  # one launch has one of each
    _near_gated(lambda norm, x: nf4.nf4_gemv(x, [matrix, second], norm=norm, activation="silu"), x, weight, up, device)


def _near_gated(
    run: Callable[[Norm, Tensor], Tensor], x: Tensor, gate: Tensor, up: Tensor, device: torch.device
) -> None:
    """silu(norm(x) gate^T) * norm(x) up^T, as the MLP of a decode step has it."""
    factor = 1 + 0.1 * _normal(x.shape[1], seed=3)
    got = run(Norm(factor.to(HALF).to(device), EPS), x[:1].to(device))
    wide = x[:1].double()
    wide = wide * torch.rsqrt(wide.square().mean() + EPS) * factor.to(HALF).double()
    first, second = wide @ gate.double().T, wide @ up.double().T
    sizes = wide.abs() @ gate.double().abs().T, wide.abs() @ up.double().abs().T
    _near(got, F.silu(first) * second, 2 * (sizes[0] * second.abs() + first.abs() * sizes[1]))


def _nf4_gemm(device: torch.device) -> None:
    x = _normal(21, COLUMNS).to(HALF)
    for tiled in (False, True):
        matrix, weight = _nf4(device, tiled)
        _near_product(nf4.nf4_gemm(x.to(device), matrix), x, weight)


def _dense_gemv(device: torch.device) -> None:
    x, weight = _normal(8, COLUMNS).to(HALF), _normal(OUT, COLUMNS, seed=2).to(HALF)
    for rows in (1, 8):
        _near_product(dense.dense_gemv(x[:rows].to(device), [weight.to(device)]), x[:rows], weight)
    up = _normal(OUT, COLUMNS, seed=4).to(HALF)
    matrices = [weight.to(device), up.to(device)]
    _near_gated(lambda norm, x: dense.dense_gemv(x, matrices, norm=norm, activation="silu"), x, weight, up, device)


def _int4_gemv(device: torch.device) -> None:
    for kind in int4s.KINDS:
        of = int4s.packed(*kind)
        x, matrix, weight = _normal(8, kind[1]).to(HALF), int4s.on(device, of), int4s.weight(of)
        for rows in (1, 8):
            _near_product(int4.int4_gemv(x[:rows].to(device), [matrix]), x[:rows], weight)
        other = int4s.packed(*kind, seed=2)
        multiply = partial(_int4_gated, [matrix, int4s.on(device, other, matrix)])
        _near_gated(multiply, x, weight, int4s.weight(other), device)


def _int4_gated(pair: list[Int4Matrix], norm: Norm, x: Tensor) -> Tensor:
    return int4.int4_gemv(x, pair, norm=norm, activation="silu")


def _int4_dequantize(device: torch.device) -> None:
    for kind in int4s.KINDS:
        of = replace(int4s.packed(*kind), order=None, in_order=True)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            out = torch.empty(int4s.OUT, kind[1], dtype=dtype, device=device)
            _same(int4.int4_dequantize(int4s.on(device, of), 0, out), int4s.weight(of).to(dtype))


def _int8_gemv(device: torch.device) -> None:
    x, packed = _normal(8, COLUMNS).to(HALF), int8_format.quantize(_normal(OUT, COLUMNS, seed=2))
    matrix = Int8Matrix(packed.codes.to(device), packed.scales.to(device))
    weight = int8_format.dequantize(packed, torch.float32)
    for rows in (1, 8):
        _near_product(int8.int8_gemv(x[:rows].to(device), [matrix]), x[:rows], weight)


def _additive_dequantize(device: torch.device) -> None:
    """AQLM in four layouts, and vq2 with two books, to each type."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for layout in books.LAYOUTS:
            packed = books.aqlm_packed(layout, 82, 144)
            moved, (number, entries, rows, columns) = packed.to(device), layout
            codes = CodeSet(moved.codes, moved.codebooks.view(number, entries, rows * columns), columns)
            out = torch.full((82, 144), torch.nan, dtype=dtype, device=device)
            unpack.additive_dequantize([codes], moved.scales, 0, out, out_group=rows, rounded=True)
            _same(out, aqlm.dequantize(packed, dtype))
        two = books.vq2_packed(83, 144)
        sets = [CodeSet(codes[..., None], book[None], 144 // codes.shape[1]) for codes, book in two.to(device).books]
        out = torch.full((83, 144), torch.nan, dtype=dtype, device=device)
        unpack.additive_dequantize(sets, two.scales.to(device), 0, out, rounded=False)
        _same(out, vq2_codec.dequantize(two, dtype))


def _vptq_dequantize(device: torch.device) -> None:
    for scheme in books.VPTQ_SCHEMES:
        packed = books.vptq_packed(scheme, 83, 328)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            out = torch.full((83, 328), torch.nan, dtype=dtype, device=device)
            unpack.vptq_dequantize(books.vptq_matrix(packed, device), 0, out)
            _same(out, vptq_codec.dequantize(packed, dtype))


def _fused(product: Callable[..., Tensor], norm: Norm, x: Tensor) -> Tensor:
    return product(x, norm=norm)


def _gather_gemv(device: torch.device) -> None:
    x = _normal(8, COLUMNS).to(HALF)
    for layout in books.LAYOUTS[:2]:
        pair = [books.gather_matrix(books.aqlm_packed(layout, OUT, COLUMNS, seed), device) for seed in (1, 5)]
        for rows in (1, 8):
            _near_product(gather.gather_gemv(x[:rows].to(device), [pair[0][0]]), x[:rows], pair[0][1])
        both = [matrix for matrix, _ in pair]
        run = partial(_fused, partial(gather.gather_gemv, matrices=both, activation="silu"))
        _near_gated(run, x, pair[0][1], pair[1][1], device)


def _vptq_gemv(device: torch.device) -> None:
    x = _normal(8, COLUMNS).to(HALF)
    for scheme in books.VPTQ_SCHEMES:
        pair = [books.vptq_packed(scheme, OUT, COLUMNS, seed) for seed in (1, 5)]
        both = [books.vptq_matrix(packed, device) for packed in pair]
        gate, up = (vptq_codec.dequantize(packed, torch.float32) for packed in pair)
        for rows in (1, 8):
            _near_product(gather.vptq_gemv(x[:rows].to(device), both[:1]), x[:rows], gate)
        run = partial(_fused, partial(gather.vptq_gemv, matrices=both, activation="silu"))
        _near_gated(run, x, gate, up, device)


def _gather_roof(device: torch.device) -> None:
    """An even number of equal words cancels out in every sum."""
    table = torch.full((2**14,), 0x5A, dtype=torch.uint8, device=device)
    sums = torch.full((512,), -1, dtype=torch.int32, device=device)
    for step in gather.ROOF_STEPS:
        _same(gather.gather_roof(table, step, 32, sums), torch.zeros(512, dtype=torch.int32))


def _vq_gemv(device: torch.device) -> None:
    """One and two books, of one stride and of two."""
    x = _normal(8, COLUMNS).to(HALF)
    for scheme in books.VQ_SCHEMES:
        pair = [books.vq_matrix(scheme, OUT, COLUMNS, device, seed) for seed in (1, 5)]
        for rows in (1, 2, 3, 8):
            _near_product(vq.vq_gemv(x[:rows].to(device), [pair[0][0]]), x[:rows], pair[0][1])
        run = partial(_fused, partial(vq.vq_gemv, matrices=[matrix for matrix, _ in pair], activation="silu"))
        _near_gated(run, x, pair[0][1], pair[1][1], device)


def _vq_dequantize(device: torch.device) -> None:
    """Books that the fast kernel reads, and others."""
    for scheme in books.TILED_SCHEMES:
        linear, definition = books.tiled_linear(scheme, 83, 304, device)
        assert linear.matrix is not None  # a layout that the kernel reads
        codebooks = [book.values for book in linear.books()]
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            out = torch.full((51, 304), torch.nan, dtype=dtype, device=device)
            vq_dequantize.vq_dequantize(linear.matrix, codebooks, 32, out, rounded=linear.format == "AQLM")
            _same(out, definition(dtype)[32:])


def _hadamard(device: torch.device) -> None:
    for columns in (48, COLUMNS, 1536, 8192):
        x, signs = _normal(3, columns).to(HALF), rotation.packed_signs(_normal(columns, seed=2) < 0)
        _same(hadamard.hadamard(x.to(device), signs.to(device)), rotation.rotate(x, signs))


def _attention_decode(device: torch.device) -> None:
    """A cache of each width, filled and read by the kernels, against the same on the CPU; with sinks in 16 bit."""
    heads, kv_heads, width, slots = 6, 2, 64, 200
    qkv = _normal(1, (heads + 2 * kv_heads) * width).to(HALF)
    kept = [_normal(slots - 1, kv_heads, width, seed=seed).to(HALF) for seed in (2, 3)]
    workspace = attention.Workspace(heads, kv_heads, width, device)
    for bits in attention.BITS:
        caches = [KVCache([(kv_heads, width)], slots + 9, HALF, place, bits) for place in ("cpu", device)]
        for cache, place in zip(caches, (torch.device("cpu"), device), strict=True):
            cache.update(0, kept[0].to(place), kept[1].to(place), torch.arange(slots - 1, device=place), slots - 1)
        sinks = torch.linspace(-1, 4, heads).to(HALF) if bits == 16 else torch.full((heads,), -torch.inf)
        got = attention.attention_decode(
            qkv.to(device), caches[1].layer(0), torch.tensor([slots - 1], device=device), heads=heads, rotary=None,
            q_norm=None, k_norm=None, scale=width**-0.5, softcap=0.0, window=0, workspace=workspace,
            sinks=sinks.to(device) if bits == 16 else None,
        )  # fmt: skip
        q, new = qkv[:, : heads * width].view(heads, 1, width), qkv[0, heads * width :].view(2, 1, kv_heads, width)
        k, v = (
            each.double().repeat_interleave(heads // kv_heads, 0)
            for each in caches[0].update(0, new[0], new[1], torch.tensor([slots - 1]), slots)
        )
        scores = torch.cat((q.double() @ k.transpose(-1, -2) * width**-0.5, sinks.double().view(heads, 1, 1)), -1)
        weights = torch.softmax(scores, -1)[..., :slots]
        # The turned q is rounded as well, and a code at a tie may be rounded to its other neighbour here.
        slack = {16: 1, 8: 2, 4: 4}[bits]
        _near(got.view(heads, 1, width), weights @ v, slack * (4 * weights @ v.abs()))


def _vq_search(device: torch.device) -> None:
    for stride, length, beam in searches.SHAPES:
        if why := searches.known(43, 6 * stride, stride, length, device).why_not(beam):
            raise Mismatch(why)


def _embed(device: torch.device) -> None:
    table, ids = _normal(37, 72).to(HALF), torch.tensor([36])
    for place in (table.to(device), table.pin_memory()):
        out = torch.full((1, 72), torch.nan, dtype=HALF, device=device)
        embed.embed(ids.to(device), place, scale=2.0, out=out)
        _same(out, table[36:] * 2)


def _rmsnorm(device: torch.device) -> None:
    x, residual, factor = _normal(1, 648).to(HALF), _normal(1, 648, seed=2).to(HALF), 1 + _normal(648, seed=3)
    out = torch.empty_like(x, device=device)
    rmsnorm.rmsnorm(x.to(device), Norm(factor.to(device), EPS), residual=residual.to(device), out=out)
    part = x.double() * torch.rsqrt(x.double().square().mean() + EPS) * factor.double()
    _near(out, part + residual.double(), part.abs() + residual.double().abs())


def _sample(device: torch.device) -> None:
    vocab, steps = 3001, 4
    logits = 3 * _normal(vocab)
    draw = Sampling(temperature=0.8, top_k=200, top_p=0.9, repeat_penalty=1.2, seed=5)
    for settings in (Sampling(), draw, replace(draw, xtc_probability=0.7, xtc_threshold=0.01)):
        states = [SamplerState(vocab, steps, place) for place in (torch.device("cpu"), device)]
        for state in states:
            state.reset(settings, torch.arange(0, vocab, 7), steps)
        chosen, token, position = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(3))
        for _ in range(steps):
            expected = sampler.sample(logits, states[0], settings.greedy)
            states[0].advance(expected)
            sampling.sample(
                logits.to(device), states[1], greedy=settings.greedy, softcap=0.0, chosen=chosen, token=token,
                position=position,
            )  # fmt: skip
            _same(chosen, expected)
        _same(position, torch.tensor([steps]))


def _dry_match(device: torch.device) -> None:
    states = replies.states_of(3001, 700, device)
    adjust.dry_match(states[1], torch.zeros(1, dtype=torch.int64, device=device))
    _same(states[1].matches, sampler.repeated_lengths(states[0]).int())


def _adjust(device: torch.device) -> None:
    states, logits = replies.states_of(3001, 700, device), 3 * _normal(3001)
    got, state = logits.to(device, copy=True), replies.found(states)
    adjust.adjust(got, state)
    _same(got, sampler.adjusted(logits, states[0]))
    _same(state.matches, torch.zeros(3001, dtype=torch.int32))


# Kernel -> its check; a check that fails raises `Mismatch`. `kv_write` and `kv_read` are tested with attention, which
# reads what they stored.
CHECKS: dict[str, Callable[[torch.device], None]] = {
    "nf4_dequantize": _nf4_dequantize,
    "nf4_gemv": _nf4_gemv,
    "nf4_gemm": _nf4_gemm,
    "dense_gemv": _dense_gemv,
    "int8_gemv": _int8_gemv,
    "rowlut_gemv": partial(rowluts.gemv, near_product=_near_product, near_gated=_near_gated),
    "rowlut_dequantize": rowluts.dequantize,
    "int4_gemv": _int4_gemv,
    "int4_dequantize": _int4_dequantize,
    "mxfp4_gemv": partial(mixtures.gemv, near_product=_near_product, near_gated=_near_gated),
    "mxfp4_dequantize": mixtures.dequantize,
    "route": partial(mixtures.route, near=_near),
    "router": partial(mixtures.router, near=_near),
    "experts_gate_up": partial(mixtures.gate_up, near=_near),
    "experts_down": partial(mixtures.down, near=_near),
    "additive_dequantize": _additive_dequantize,
    "vptq_dequantize": _vptq_dequantize,
    "gather_gemv": _gather_gemv,
    "vptq_gemv": _vptq_gemv,
    "gather_roof": _gather_roof,
    "vq_gemv": _vq_gemv,
    "vq_dequantize": _vq_dequantize,
    "bcq_gemv": partial(binary.check_products, near_product=_near_product, near_gated=_near_gated),
    "bcq_dequantize": partial(binary.check_weights, same=_same),
    "hadamard": _hadamard,
    "attention_decode": _attention_decode,
    "vq_search": _vq_search,
    "embed": _embed,
    "rmsnorm": _rmsnorm,
    "dry_match": _dry_match,
    "adjust": _adjust,
    "sample": _sample,
}
