"""The checks of the self-test: every kernel on small, odd shapes, against the reference on the CPU.

Kernels of matrices are checked by `formats`, of mixtures by `experts`, `codebook_experts` and `gguf_experts`, the
others here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import torch

from localq.engine import sampler
from localq.engine.cache import KVCache
from localq.engine.sampler import SamplerState
from localq.engine.selftest import codebook_experts, delta_nets, delta_rows, formats, gguf_experts, replies
from localq.engine.selftest import experts as mixtures
from localq.engine.selftest import search as searches
from localq.engine.selftest.compare import (
    COLUMNS,
    EPS,
    HALF,
    OUT,
    Mismatch,
    near,
    near_gated,
    near_product,
    normal,
    same,
)
from localq.files.layer_caches import KeysAndValues
from localq.formats.codebooks import rotation, rotation_kernel
from localq.kernels import attention, dense, embed, logit_adjust, rmsnorm, sampling
from localq.kernels.dense import DenseOperand
from localq.kernels.gemv import Norm
from localq.kv_bits import K8V4, KV_BITS
from localq.sampling import Sampling


def _dense_gemv(device: torch.device) -> None:
    x, weight = normal(8, COLUMNS).to(HALF), normal(OUT, COLUMNS, seed=2).to(HALF)
    for rows in (1, 8):
        near_product(dense.dense_gemv(x[:rows].to(device), [DenseOperand(weight.to(device))]), x[:rows], weight)
    up = normal(OUT, COLUMNS, seed=4).to(HALF)
    matrices = [DenseOperand(each.to(device)) for each in (weight, up)]
    near_gated(lambda norm, x: dense.dense_gemv(x, matrices, norm=norm, activation="silu"), x, weight, up, device)


def _hadamard(device: torch.device) -> None:
    for columns in (48, COLUMNS, 1536, 8192):
        x, signs = normal(3, columns).to(HALF), rotation.packed_signs(normal(columns, seed=2) < 0)
        same(rotation_kernel.hadamard(x.to(device), signs.to(device)), rotation.rotate(x, signs))


def _attention_decode(device: torch.device) -> None:
    """A cache of each width, filled and read by the kernels, against the same on the CPU; with sinks in 16 bit; then
    with a gate behind q of every head."""
    heads, kv_heads, width, slots = 6, 2, 64, 200
    pairs, kv = normal(heads, 2, width).to(HALF), normal(2, 1, kv_heads, width, seed=4).to(HALF)
    q, gate = pairs[:, :1], pairs[:, 1:]
    kept = [normal(slots - 1, kv_heads, width, seed=seed).to(HALF) for seed in (2, 3)]
    workspace = attention.AttentionWorkspace(heads, kv_heads, width, device)
    for bits, gated in product(KV_BITS, (False, True)):
        caches = [KVCache([KeysAndValues(kv_heads, width)], slots + 9, HALF, place, bits) for place in ("cpu", device)]
        for cache, place in zip(caches, (torch.device("cpu"), device), strict=True):
            cache.update(0, kept[0].to(place), kept[1].to(place), torch.arange(slots - 1, device=place), slots - 1)
        sinks = torch.linspace(-1, 4, heads).to(HALF) if bits == 16 else torch.full((heads,), -torch.inf)
        queries = (pairs if gated else q).reshape(heads, -1)
        qkv = torch.cat((queries.flatten(), kv.flatten()))[None].to(device)
        got = attention.attention_decode(
            qkv, caches[1].layer(0), torch.tensor([slots - 1], device=device), heads=heads, rotary=None,
            q_norm=None, k_norm=None, scale=width**-0.5, softcap=0.0, window=0, workspace=workspace,
            sinks=sinks.to(device) if bits == 16 else None, q_stride=queries.shape[1],
            gate=qkv[0, : queries.numel()].view(heads, -1)[:, width:] if gated else None,
        )  # fmt: skip
        k, v = (
            each.double().repeat_interleave(heads // kv_heads, 0)
            for each in caches[0].update(0, kv[0], kv[1], torch.tensor([slots - 1]), slots)
        )
        scores = torch.cat((q.double() @ k.transpose(-1, -2) * width**-0.5, sinks.double().view(heads, 1, 1)), -1)
        weights = torch.softmax(scores, -1)[..., :slots]
        opened = torch.sigmoid(gate.double()) if gated else torch.ones(heads, 1, width)
        # The turned q is rounded as well, and a code at a tie may be rounded to its other neighbour here.
        slack = {16: 1, 8: 2, K8V4: 4, 4: 4}[bits]
        near(got.view(heads, 1, width), weights @ v * opened, slack * (4 * weights @ v.abs()) * opened)


def _delta_decode(device: torch.device) -> None:
    """Two tokens, of two key heads with three value heads each."""
    case = delta_nets.draw_step(2, 3, HALF, device)
    workspace = case.workspace()
    for _ in range(2):
        out, columns, matrix = case.to(torch.device("cpu")).expected()
        got = case.run(workspace)
        same(case.token.columns, columns)
        near(case.token.matrix, matrix, matrix.abs() + 1)
        near(got, out, delta_nets.ROUNDED * (out.abs() + 1))


def _delta_verify(device: torch.device) -> None:
    """A step of four tokens, three of which are accepted, and one of two tokens behind it, which replays."""
    case, cpu = delta_rows.draw_rows(2, 3, HALF, device), torch.device("cpu")
    generator = torch.Generator().manual_seed(1)
    earlier = case.draw(0, generator)
    for rows, accepted in ((4, 3), (2, 2)):
        tokens, before = case.draw(rows, generator), case.to(cpu).clone()
        if len(earlier.x):
            _, before.step.token.columns, before.step.token.matrix = before.expected(earlier)
        given = tokens.to(cpu)
        out, _, _ = before.expected(given)
        _, columns, matrix = before.expected(given[:1])
        got = case.verify(tokens)
        same(case.step.token.columns, columns)
        near(case.step.token.matrix, matrix, matrix.abs() + 1)
        near(got, out, delta_nets.ROUNDED * (out.abs() + 1))
        case.position += accepted
        earlier = given[1:accepted]


def _delta_prefill(device: torch.device) -> None:
    """Two passes, of which the first fills a chunk and two tokens of the next."""
    case = delta_nets.draw(1, 2, HALF, device, tokens=66)
    for tokens in (66, 3):
        parts = {name: getattr(case, name)[:tokens] for name in ("inputs", "gates", "write", "decay")}
        case = replace(case, **parts)
        out, columns, matrix = delta_nets.expected(case.to(torch.device("cpu")))
        got = case.prefill()
        same(case.columns, columns)
        near(case.matrix, matrix, matrix.abs() + 1)
        near(got, out, delta_nets.ROUNDED * (out.abs() + 1))


def _vq_search(device: torch.device) -> None:
    for stride, length, beam in searches.SHAPES:
        if why := searches.known(43, 6 * stride, stride, length, device).why_not(beam):
            raise Mismatch(why)


def _embed(device: torch.device) -> None:
    table, ids = normal(37, 72).to(HALF), torch.tensor([36])
    for place in (table.to(device), table.pin_memory()):
        out = torch.full((1, 72), torch.nan, dtype=HALF, device=device)
        embed.embed(ids.to(device), place, scale=2.0, out=out)
        same(out, table[36:] * 2)


def _rmsnorm(device: torch.device) -> None:
    x, residual, factor = normal(1, 648).to(HALF), normal(1, 648, seed=2).to(HALF), 1 + normal(648, seed=3)
    out = torch.empty_like(x, device=device)
    rmsnorm.rmsnorm(x.to(device), Norm(factor.to(device), EPS), residual=residual.to(device), out=out)
    part = x.double() * torch.rsqrt(x.double().square().mean() + EPS) * factor.double()
    near(out, part + residual.double(), part.abs() + residual.double().abs())


def _sample(device: torch.device) -> None:
    vocab, steps = 3001, 4
    logits = 3 * normal(vocab)
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
            same(chosen, expected)
        same(position, torch.tensor([steps]))


def _dry_match(device: torch.device) -> None:
    states = replies.states_of(3001, 700, device)
    logit_adjust.dry_match(states[1], torch.zeros(1, dtype=torch.int64, device=device))
    same(states[1].matches, sampler.repeated_lengths(states[0]).int())


def _adjust(device: torch.device) -> None:
    states, logits = replies.states_of(3001, 700, device), 3 * normal(3001)
    got, state = logits.to(device, copy=True), replies.found(states)
    logit_adjust.adjust(got, state)
    same(got, sampler.adjust(logits, states[0]))
    same(state.matches, torch.zeros(3001, dtype=torch.int32))


# Kernel -> its check; a check that fails raises `Mismatch`. `kv_write` and `kv_read` are tested with attention, which
# reads what they stored.
CHECKS: dict[str, Callable[[torch.device], None]] = {
    **formats.CHECKS,
    "dense_gemv": _dense_gemv,
    "route": mixtures.route,
    "router": mixtures.router,
    "experts_gate_up": mixtures.gate_up,
    "experts_down": mixtures.down,
    "experts_sort": mixtures.sort_entries,
    "experts_gemm": mixtures.gemm,
    "experts_sum": mixtures.sum_entries,
    "gather_roof": formats.check_gather_roof,
    "vq_experts_gate_up": codebook_experts.gate_up,
    "vq_experts_down": codebook_experts.down,
    "gguf_experts_gate_up": gguf_experts.gate_up,
    "gguf_experts_down": gguf_experts.down,
    "hadamard": _hadamard,
    "attention_decode": _attention_decode,
    "delta_decode": _delta_decode,
    "delta_verify": _delta_verify,
    "delta_prefill": _delta_prefill,
    "vq_search": _vq_search,
    "vq_adjoint": searches.check_adjoint,
    "embed": _embed,
    "rmsnorm": _rmsnorm,
    "dry_match": _dry_match,
    "adjust": _adjust,
    "sample": _sample,
}
