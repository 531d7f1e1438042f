"""Rows of the small kernels of a decode step: embedding, norm, sampling. Latency, not bandwidth, is their cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.bench.kernels.shapes import Workload
from localq.bench.kernels.table import Row
from localq.bench.kernels.timing import SEED, Bench, check, clones, type_name, wrong
from localq.drafts import ROWS
from localq.engine import sampler
from localq.engine.sampler import SamplerState
from localq.engine.selftest import delta_nets, delta_rows
from localq.engine.selftest import replies as selftest_replies
from localq.engine.selftest.compare import Mismatch, near
from localq.files import delta_memory
from localq.kernels import delta_net, embed, logit_adjust, rmsnorm, sampling
from localq.kernels.gemv import Norm
from localq.sampling import Sampling

EPS = 1e-5
TOKENS = 512  # embedded rows that take turns
STEPS = 2**16  # of the reply that the sampler believes to be in: more than all replays together
DRAW = Sampling(temperature=0.7, top_p=0.95, top_k=64, repeat_penalty=1.1, seed=SEED)
CHOICES = {
    "greedy": Sampling(),
    "top-k, top-p, penalty": DRAW,
    "top-k, top-p, penalty, XTC": replace(DRAW, xtc_probability=1.0, xtc_threshold=0.02),
}
HISTORY = 32768  # tokens that DRY looks at
TORCH = "torch"
PASS = 2048  # tokens of `delta_prefill`
DELTA_NETS = ((16, 3, 5120), (16, 2, 4096), (16, 1, 1024))  # key heads, value heads for each, hidden: 27B, 9B, 0.8B


def cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """Return the rows to measure for `work`, one callable each."""
    found: list[Callable[[Bench], Row]] = [partial(rmsnorm_row, width=width) for width in work.widths]
    found += [
        partial(delta_decode_row, key_heads=heads, shared=each, hidden=hidden) for heads, each, hidden in DELTA_NETS
    ]
    found += [
        partial(delta_verify_row, key_heads=heads, shared=each, hidden=hidden, rows=rows)
        for heads, each, hidden in DELTA_NETS
        for rows in ROWS[1:]
    ]
    found += [partial(delta_prefill_row, key_heads=heads, shared=each) for heads, each, _ in DELTA_NETS]
    for vocab, hidden in work.tables:
        found += [partial(embed_row, vocab=vocab, hidden=hidden, pinned=pinned) for pinned in (False, True)]
        found += [partial(sample_row, vocab=vocab, choice=choice) for choice in CHOICES]
        found += [partial(dry_match_row, vocab=vocab), partial(adjust_row, vocab=vocab)]
    return found


def embed_row(bench: Bench, vocab: int, hidden: int, pinned: bool) -> Row:
    """One `embed` of one token, from the device or from pinned host memory."""
    dtype = torch.float16
    table = bench.normal(vocab, hidden, dtype=dtype)
    if pinned:
        table = table.cpu().pin_memory()
    ids = torch.arange(TOKENS, device=bench.device) * (vocab // TOKENS)
    out = torch.empty(1, hidden, dtype=dtype, device=bench.device)
    what = f"{vocab} x {hidden}, {'host' if pinned else 'device'}"
    launches = [partial(embed.embed, token, table, scale=1.0, out=out) for token in torch.split(ids, 1)]
    launches[-1]()
    if not torch.equal(out[0], table[int(ids[-1])].to(bench.device)):
        raise wrong("embed", what, "the output does not match the row in the embedding table")
    return Row("step", "embed", what, 1, type_name(dtype), embed.embed_bytes(1, hidden), bench.time(launches))


def rmsnorm_row(bench: Bench, width: int) -> Row:
    """One `rmsnorm` with a residual, as the families with norms after attention and MLP have it."""
    dtype = torch.bfloat16
    x, residual = (bench.normal(1, width, dtype=dtype, seed=SEED + part) for part in (1, 2))
    norm = Norm(1 + 0.1 * bench.normal(width), EPS)
    out = torch.empty_like(x)

    def run(x: Tensor) -> Tensor:
        return rmsnorm.rmsnorm(x, norm, residual=residual, out=out)

    exact = x.double() * torch.rsqrt(x.double().square().mean() + EPS) * norm.weight.double() + residual.double()
    naive = F.rms_norm(x, (width,), norm.weight.to(dtype), EPS) + residual
    check("rmsnorm", f"{width}", run(x), exact, naive)
    moved = rmsnorm.rmsnorm_bytes(1, width, residual=True, offset=True)
    copies = list(clones(x, TOKENS))
    rival = bench.rival(TORCH, [partial(F.rms_norm, each, (width,), norm.weight.to(dtype), EPS) for each in copies])
    timing = bench.time([partial(run, each) for each in copies])
    return Row("step", "rmsnorm", f"{width}, + residual", 1, type_name(dtype), moved, timing, (rival,))


def delta_decode_row(bench: Bench, key_heads: int, shared: int, hidden: int) -> Row:
    """One `delta_decode` of one token, with layers that take turns; must give what f64 gives."""
    dtype = torch.float16
    case = delta_nets.draw_step(key_heads, shared, dtype, bench.device, hidden=hidden)
    what, workspace = f"{key_heads} key heads, {key_heads * shared} value heads", case.workspace()
    exact, _, _ = case.expected()
    layers = [case.clone() for _ in range(bench.copies(case.token.matrix.nbytes))]
    launches = [partial(each.run, workspace, torch.empty_like(each.token.gates)) for each in layers]
    try:
        near(launches[0](), exact.cpu(), delta_nets.ROUNDED * (exact.cpu().abs() + 1))
    except Mismatch as error:
        raise wrong("delta_decode", what, str(error)) from error
    moved = delta_net.delta_decode_bytes(case.token.weights, hidden)
    return Row("step", "delta_decode", what, 1, type_name(dtype), moved, bench.time(launches))


def delta_verify_row(bench: Bench, key_heads: int, shared: int, hidden: int, rows: int) -> Row:
    """One `delta_verify` that replays as many drafted tokens as it has; what it reads must be what f64 gives."""
    dtype = torch.float16
    case = delta_rows.draw_rows(key_heads, shared, dtype, bench.device, hidden=hidden)
    tokens = case.draw(rows, torch.Generator().manual_seed(1))
    what = f"{key_heads} key heads, {key_heads * shared} value heads, {rows} tokens"
    exact, _, _ = case.expected(tokens)
    try:
        near(case.verify(tokens), exact.cpu(), delta_nets.ROUNDED * (exact.cpu().abs() + 1))
    except Mismatch as error:
        raise wrong("delta_verify", what, str(error)) from error
    case.position += rows
    layers = [case.clone() for _ in range(bench.copies(case.step.token.matrix.nbytes))]
    outs = [torch.empty(rows, case.step.token.gates.shape[1], dtype=dtype, device=bench.device) for _ in layers]
    launches = [partial(each.run, tokens, out) for each, out in zip(layers, outs, strict=True)]
    moved = delta_net.delta_verify_bytes(case.step.token.weights, hidden, rows)
    return Row("step", "delta_verify", what, rows, type_name(dtype), moved, bench.time(launches))


def delta_prefill_row(bench: Bench, key_heads: int, shared: int) -> Row:
    """One `delta_prefill` of many tokens, whose floor in FLOP is told as well; must give what f64 gives."""
    dtype = torch.float16
    case = delta_nets.draw(key_heads, shared, dtype, bench.device, tokens=PASS)
    flops = delta_net.delta_prefill_flops(case.weights, PASS)
    what = f"{PASS} tokens, {key_heads * shared} heads, {flops / 1e9:.1f} GFLOP"
    exact, _, _ = delta_nets.expected(case)
    size = delta_memory.kernel_bytes(PASS, key_heads, shared)
    workspace, out = torch.empty(size, dtype=torch.uint8, device=bench.device), torch.empty_like(case.gates)
    states = clones(case.matrix, bench.copies(case.inputs.nbytes + case.gates.nbytes))
    launches = [partial(replace(case, matrix=each).prefill, workspace, out) for each in states]
    try:
        near(launches[0](), exact.cpu(), delta_nets.ROUNDED * (exact.cpu().abs() + 1))
    except Mismatch as error:
        raise wrong("delta_prefill", what, str(error)) from error
    moved = delta_net.delta_prefill_bytes(case.weights, PASS)
    return Row("step", "delta_prefill", what, PASS, type_name(dtype), moved, bench.time(launches))


def dry_match_row(bench: Bench, vocab: int) -> Row:
    """One `dry_match` over a long history that repeats itself; must find what the reference finds."""
    states = selftest_replies.states_of(vocab, HISTORY, bench.device)
    token = torch.zeros(1, dtype=torch.int64, device=bench.device)
    logit_adjust.dry_match(states[1], token)
    if not torch.equal(states[1].matches.cpu(), sampler.repeated_lengths(states[0]).int()):
        raise wrong("dry_match", f"{HISTORY} tokens", "the output differs from the reference")
    timing = bench.time([partial(logit_adjust.dry_match, states[1], token)])
    return Row("step", "dry_match", f"{HISTORY} tokens", 1, "int32", logit_adjust.dry_match_bytes(HISTORY), timing)


def adjust_row(bench: Bench, vocab: int) -> Row:
    """One `adjust` with DRY and a mask; must give the scores of the reference."""
    states = selftest_replies.states_of(vocab, TOKENS, bench.device)
    logits, state = 4 * bench.normal(vocab), selftest_replies.found(states)
    what, scores = f"{vocab} logits, DRY and mask", logits.clone()
    logit_adjust.adjust(scores, state)
    if not torch.equal(scores.cpu(), sampler.adjust(logits.cpu(), states[0])):
        raise wrong("adjust", what, "the output differs from the reference")
    timing = bench.time(
        [partial(logit_adjust.adjust, each, state) for each in clones(logits, bench.copies(logits.nbytes))]
    )
    return Row("step", "adjust", what, 1, "float32", logit_adjust.adjust_bytes(vocab, dry=True), timing)


def sample_row(bench: Bench, vocab: int, choice: str) -> Row:
    """One `sample` over all logits; must choose what the reference chooses."""
    logits, settings = 4 * bench.normal(vocab), CHOICES[choice]
    greedy = settings.greedy
    prompt = torch.arange(0, vocab, vocab // 64)
    state, reference = (SamplerState(vocab, STEPS, device) for device in (bench.device, torch.device("cpu")))
    for each in (state, reference):
        each.reset(settings, prompt, STEPS)
    chosen, token = (torch.zeros(1, dtype=torch.int64, device=bench.device) for _ in range(2))

    def run(logits: Tensor) -> None:
        sampling.sample(logits, state, greedy=greedy, softcap=0.0, chosen=chosen, token=token, position=None)

    what = f"{vocab} logits, {choice}"
    run(logits)
    expected = int(sampler.sample(logits.cpu(), reference, greedy))
    if int(chosen) != expected:
        raise wrong("sample", what, f"token {int(chosen)} was sampled, but the reference selects token {expected}")
    count = min(bench.copies(logits.nbytes), STEPS // (bench.replays + 4))
    launches = [partial(run, each) for each in clones(logits, count)]
    return Row("step", "sample", what, 1, "float32", sampling.sample_bytes(vocab), bench.time(launches))
