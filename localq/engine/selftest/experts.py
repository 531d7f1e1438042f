"""Mixtures of experts for the self-test: random, small, of odd sizes, in each format of stacks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.engine.selftest.compare import HALF, Mismatch, near, normal
from localq.formats import mxfp4 as mxfp4_format
from localq.formats import nf4 as nf4_format
from localq.formats.experts import grouped
from localq.formats.experts import kernel as expert_kernel
from localq.formats.experts.stacks import Mxfp4Stack, Nf4Stack, Stack
from localq.kernels.gemv import Norm

EXPERTS, ACTIVE, OUT, COLUMNS = 5, 3, 38, 704  # no whole units; five steps and a half


def stacks(device: torch.device, out: int = OUT) -> Iterator[tuple[Stack, Tensor]]:
    """One of each format on the device, and its weights f32 [E, out, in] on the CPU."""
    shape = (EXPERTS, out, COLUMNS)
    tall = (EXPERTS * out, COLUMNS)
    packed = mxfp4_format.sample(tall, 1)
    blocks, scales = packed.codes.view(EXPERTS, out, -1, 16), packed.scales.view(EXPERTS, out, -1)
    yield Mxfp4Stack(blocks.to(device), scales.to(device)), mxfp4_format.dequantize(packed, torch.float32).view(shape)
    coded = nf4_format.sample(tall, 3)
    operand = nf4_format.Linear(coded.to(device)).operand()
    yield Nf4Stack(operand, EXPERTS), nf4_format.dequantize(coded, torch.float32).view(shape)
    plain = (0.05 * normal(*shape, seed=6)).to(HALF)
    yield plain.to(device), plain.float()


def _chosen(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor([4, 0, 2]), torch.tensor([4, 0, 2], dtype=torch.int32, device=device)


def gate_up(device: torch.device) -> None:
    """Both gates, both orders of rows, with norm and biases."""
    of, chosen = _chosen(device)
    x, factor = normal(1, COLUMNS, seed=7).to(HALF), (1 + 0.1 * normal(COLUMNS, seed=8)).to(HALF)
    bias = normal(EXPERTS, OUT, seed=9).to(HALF)
    wide = x.double() * torch.rsqrt(x.double().square().mean() + 1e-5) * factor.double()
    for stack, dense in stacks(device):
        both = (dense[of].double() @ wide[0]) + bias[of].double()
        sizes = dense[of].double().abs() @ wide[0].abs() + bias[of].double().abs()
        for gate, interleaved in (("silu", False), ("clamped", True)):
            out = torch.full((ACTIVE, OUT // 2), torch.nan, dtype=HALF, device=device)
            norm = Norm(factor.to(device), 1e-5)
            given = (x.to(device), stack, bias.to(device), chosen)
            expert_kernel.experts_gate_up(*given, norm=norm, gate=gate, interleaved=interleaved, out=out)
            (g, u), (gs, us) = (
                (each[:, 0::2], each[:, 1::2]) if interleaved else each.chunk(2, 1) for each in (both, sizes)
            )
            if gate == "clamped":
                g, u = g.clamp(max=7), u.clamp(-7, 7) + 1
            gained = F.silu(g) if gate == "silu" else g * torch.sigmoid(1.702 * g)
            near(out, gained * u, 2 * (gs * u.abs() + (g.abs() + 1) * us))


def down(device: torch.device) -> None:
    """With biases, and the residual updated in place."""
    of, chosen = _chosen(device)
    gated, bias = normal(ACTIVE, COLUMNS, seed=7).to(HALF), normal(EXPERTS, OUT, seed=9).to(HALF)
    weights, residual = torch.tensor([0.5, 0.3, 0.2]), normal(1, OUT, seed=10).to(HALF)
    for stack, dense in stacks(device):
        out = residual.to(device, copy=True)
        given = (gated.to(device), stack, bias.to(device), chosen, weights.to(device))
        expert_kernel.experts_down(*given, residual=out, out=out)
        parts = torch.einsum("koi,ki->ko", dense[of].double(), gated.double()) + bias[of].double()
        sizes = torch.einsum("koi,ki->ko", dense[of].double().abs(), gated.double().abs()) + bias[of].double().abs()
        scaled = weights.double()[None]
        near(out, residual.double() + scaled @ parts, residual.double().abs() + scaled @ sizes)


def _check_route(logits: Tensor, weights: Tensor, chosen: Tensor) -> None:
    """Logits on the CPU: no two are equal, or the lower comes first."""
    order = sorted(range(logits.numel()), key=lambda expert: (-float(logits[expert]), expert))[: chosen.numel()]
    if chosen.tolist() != order:
        raise Mismatch(f"selected experts {chosen.tolist()}; expected {order}")
    exact = torch.softmax(logits[order].double(), 0)
    near(weights, exact, exact)


def route(device: torch.device) -> None:
    """Logits of which some are equal."""
    logits, weights = normal(1, 77, seed=1).mul(3).round(), torch.full((4,), torch.nan, device=device)
    chosen = torch.full((4,), -1, dtype=torch.int32, device=device)
    expert_kernel.route(logits.to(device), 4, how="softmax_of_chosen", weights=weights, chosen=chosen)
    _check_route(logits[0], weights, chosen)


def router(device: torch.device) -> None:
    """Twice with one workspace; with a shared expert, whose weight is a sigmoid in f16."""
    x, weight, bias = normal(1, COLUMNS, seed=1).to(HALF), normal(33, COLUMNS, seed=2).to(HALF), normal(33, seed=3)
    gate = (normal(1, COLUMNS, seed=4) / 16).to(HALF)
    workspace, exact = (
        expert_kernel.router_workspace(33, device),
        x.double() @ weight.double().T + bias.to(HALF).double(),
    )
    for shared_gate in (None, gate.to(device)):
        entries = 4 if shared_gate is None else 5
        weights = torch.full((entries,), torch.nan, device=device)
        chosen = torch.full((entries,), -1, dtype=torch.int32, device=device)
        expert_kernel.router(
            x.to(device), weight.to(device), bias.to(HALF).to(device), 4, norm=None, how="softmax_of_chosen",
            weights=weights, chosen=chosen, workspace=workspace, shared_gate=shared_gate,
        )  # fmt: skip
        logits = workspace[1:].view(torch.float32)
        near(logits, exact[0], x.double().abs()[0] @ weight.double().abs().T)
        _check_route(logits.cpu(), weights[:4], chosen[:4])
        if shared_gate is not None:
            share = torch.sigmoid(x.double() @ gate.double().T)[0]
            near(weights[4:].to(HALF), share, 1 + share)  # the logit is rounded, too
            if chosen[4] != 33:
                raise Mismatch(f"the shared expert has index {int(chosen[4])}; expected 33")


def _entries(device: torch.device) -> tuple[Tensor, grouped.Entries, Tensor]:
    """Experts int64 [83, 2] of tokens, of which one has none and one more than a tile; sorted; places [83, 2]."""
    tokens = torch.arange(83)
    chosen = torch.stack([tokens % 13 // 12 + 3, tokens % 2], 1)
    entries = grouped.experts_sort(chosen.to(device), EXPERTS)
    return chosen, entries, entries.places.cpu().long().view(chosen.shape)


def sort_entries(device: torch.device) -> None:
    """Every entry has a place among those of its expert."""
    chosen, entries, places = _entries(device)
    counts = chosen.flatten().bincount(minlength=EXPERTS)
    ends = [counts.cumsum(0), (-(-counts // grouped.TILE)).cumsum(0)]
    by_place = places.flatten().argsort()
    if sorted(places.flatten().tolist()) != list(range(len(by_place))):
        raise Mismatch("two entries have the same position")
    if not chosen.flatten()[by_place].equal(chosen.flatten().sort().values):
        raise Mismatch("entries are not sorted by expert")
    if not (entries.rows.cpu().equal((by_place // 2).int())):
        raise Mismatch("entries refer to the wrong tokens")
    if [entries.ends.tolist(), entries.tile_ends.tolist()] != [each.tolist() for each in ends]:
        raise Mismatch("the expert ranges end at the wrong positions")


def gemm(device: torch.device) -> None:
    """Gate and up of tokens with biases; down of entries."""
    out, bias = 48, normal(EXPERTS, 48, seed=9).to(HALF)
    chosen, entries, places = _entries(device)
    x, by_place = normal(len(chosen), COLUMNS, seed=7).to(HALF), normal(entries.count, COLUMNS, seed=8).to(HALF)
    for stack, dense in stacks(device, out):
        weight = dense[chosen].double()
        gated = torch.full((entries.count, out // 2), torch.nan, dtype=HALF, device=device)
        grouped.experts_gemm(x.to(device), stack, bias.to(device), entries, gate=grouped.Gate(), out=gated)
        both = torch.einsum("tkoi,ti->tko", weight, x.double()) + bias[chosen].double()
        sizes = torch.einsum("tkoi,ti->tko", weight.abs(), x.double().abs()) + bias[chosen].double().abs()
        (g, u), (gs, us) = both.chunk(2, -1), sizes.chunk(2, -1)
        near(gated.cpu()[places], F.silu(g) * u, 3 * (gs * u.abs() + (g.abs() + 1) * us))
        each = torch.full((entries.count, out), torch.nan, dtype=HALF, device=device)
        grouped.experts_gemm(by_place.to(device), stack, None, entries, gate=None, out=each)
        given = by_place[places].double()
        exact, sizes = (torch.einsum("tkoi,tki->tko", *of) for of in ((weight, given), (weight.abs(), given.abs())))
        near(each.cpu()[places], exact, sizes)


def sum_entries(device: torch.device) -> None:
    """Weighted sums of two entries of each token."""
    _, entries, places = _entries(device)
    each, weights = normal(entries.count, OUT + 2, seed=5).to(HALF), normal(len(places), 2, seed=6).abs()
    out = torch.full((len(places), OUT + 2), torch.nan, dtype=HALF, device=device)
    grouped.experts_sum(each.to(device), entries, weights.to(device), out)
    parts = weights.double()[..., None] * each[places].double()
    near(out, parts.sum(1), parts.abs().sum(1))
