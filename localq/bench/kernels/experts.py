"""Rows of mixtures of experts at the shapes of models.

Cold: experts take turns, so that those of a launch were not read for more than twice the cache. `mixture` is router,
gate and up, and down behind each other, as a layer of a decode step has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.bench.kernels import formats
from localq.bench.kernels.shapes import MixtureShape, Workload
from localq.bench.kernels.table import Row
from localq.bench.kernels.timing import SEED, Bench, check, clones, type_name, wrong
from localq.files import format_facts
from localq.formats import STACKS, gguf, mxfp4, nf4
from localq.formats.codebooks import tiles as codebook_tiles
from localq.formats.codebooks import vq2
from localq.formats.codebooks.definition import dequantize_codes
from localq.formats.codebooks.experts_kernel import VqStack, vq_stack
from localq.formats.codebooks.lookup_kernel import VqBook, VqOperand
from localq.formats.experts import grouped
from localq.formats.experts import kernel as expert_kernel
from localq.formats.experts.stacks import Mxfp4Stack, Nf4Stack, Stack, shape_of
from localq.formats.gguf import tiles as gguf_tiles
from localq.formats.gguf.experts_kernel import GgufStack, gguf_stack
from localq.formats.gguf.kernel import GgufOperand
from localq.formats.table_stack import TableStack
from localq.kernels.gemv import Norm

HALF = torch.float16
MXFP4_DTYPE = torch.bfloat16  # of gpt-oss
EPS = 1e-5
PROMPTS = (512, 1024)  # tokens of a pass
OPERATIONS = {  # what multiplies experts in a format, where it has kernels of its own
    "vq2": {"experts_gate_up": "vq_experts_gate_up", "experts_down": "vq_experts_down"},
    "gguf": {"experts_gate_up": "gguf_experts_gate_up", "experts_down": "gguf_experts_down"},
}
GGUF_TYPES = ("Q4_K", "Q6_K")  # of gate and up, and of down in most layers of a Q4_K_M file


def cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """Return the rows to measure for `work`, one callable each."""
    found: list[Callable[[Bench], Row]] = []
    for mixture in work.mixtures:
        found += [partial(row, mixture=mixture) for row in (router_row, gate_up_row, down_row, mixture_row)]
    found += [partial(route_row, mixture=mixture) for mixture in work.mixtures[:1]]
    stacked = [mixture for mixture in work.mixtures if format_facts.of(mixture.format).stacks_experts]
    for mixture, tokens, op in itertools.product(stacked, PROMPTS, ("experts_sort", "experts_gemm", "experts_sum")):
        found.append(partial(grouped_row, mixture=mixture, tokens=tokens, op=op))
    return found + formats.cases(work, "experts")


@dataclass(frozen=True)
class Operands:
    """A layer of so many experts that they take turns; `turns` int32 [k] each, a shared one among them."""

    x: Tensor
    norm: Norm
    gate_up: Stack
    down: Stack
    turns: list[Tensor]
    weights: Tensor
    gated: Tensor
    out: Tensor

    def run_gate_up(self, chosen: Tensor, mixture: MixtureShape) -> None:
        """One launch."""
        expert_kernel.experts_gate_up(
            self.x, self.gate_up, None, chosen, norm=self.norm, gate=mixture.gate, interleaved=mixture.interleaved,
            out=self.gated,
        )  # fmt: skip

    def run_down(self, chosen: Tensor, behind_gate_up: bool = False) -> None:
        """One launch; x is what is added to."""
        expert_kernel.experts_down(
            self.gated, self.down, None, chosen, self.weights, residual=self.x, out=self.out,
            behind_gate_up=behind_gate_up,
        )  # fmt: skip


def _stack(bench: Bench, mixture: MixtureShape, count: int, out: int, columns: int, seed: int) -> Stack:
    if mixture.format in STACKS:
        packed = mxfp4.sample((count * out, columns), seed, bench.device)
        blocks = packed.codes.view(count, out, -1, mxfp4.BLOCK // 2)
        return Mxfp4Stack(blocks, packed.scales.view(blocks.shape[:3]))
    if mixture.format == "gguf":
        return _in_blocks(bench, count, out, columns, 2 if out == 2 * mixture.width else 1, seed)
    if not format_facts.of(mixture.format).stacks_experts:
        return _in_codebooks(bench, count, out, columns, 2 if out == 2 * mixture.width else 1, seed)
    return Nf4Stack(nf4.Linear(nf4.sample((count * out, columns), seed, bench.device)).operand(), count)


def _in_blocks(bench: Bench, count: int, out: int, columns: int, parts: int, seed: int) -> GgufStack:
    type, made = GGUF_TYPES[2 - parts], []
    for expert in range(count):
        seeds = (seed + 2 * expert + part for part in range(parts))
        samples = (gguf.sample((out // parts, columns), each, bench.device, type) for each in seeds)
        made.append([GgufOperand(gguf_tiles.tile(each.blocks, type), type, factor=each.factor) for each in samples])
    return gguf_stack(made)


def _in_codebooks(bench: Bench, count: int, out: int, columns: int, parts: int, seed: int) -> VqStack:
    """vq2 of 2 bits, with codebooks of every expert's own; of gate and up one."""
    made = []
    for expert in range(count):
        seeds = (seed + 2 * expert + part for part in range(parts))
        first, *others = (_in_tiles(bench, (out // parts, columns), each) for each in seeds)
        made.append([first, *(replace(each, books=_books_of(first, each), factor=first.factor) for each in others)])
    return vq_stack(made)


def _in_tiles(bench: Bench, shape: tuple[int, int], seed: int) -> VqOperand:
    operand = vq2.Linear(vq2.sample(shape, seed, bench.device)).put_into_tiles().operand()
    assert isinstance(operand, VqOperand)  # a layout that the kernels read
    return operand


def _weights_of(operand: VqOperand | GgufOperand) -> Tensor:
    """f32 [out, in] of a matrix as the kernels take it: back from tiles and fragments."""
    if isinstance(operand, GgufOperand):
        blocks = gguf_tiles.untile(operand.blocks, operand.type)
        return gguf.dequantize(gguf.Packed(blocks, operand.type, factor=operand.factor), torch.float32)
    (book,) = operand.books
    codes = codebook_tiles.untile(book.codes.flatten(), (operand.out_features, book.tile_positions))
    parts = book.fragments.float().view(16, book.steps, 8, 4, 2, 2, 2)  # m, k, g, t, upper columns, upper rows, i
    codebook = parts.permute(0, 5, 2, 1, 4, 3, 6).reshape(1, 256, -1) * operand.factor
    total = dequantize_codes(codes[:, :, None], codebook, book.stride, codebook.shape[2], operand.in_features)
    return total * operand.scales[:, None].float()


def _books_of(first: VqOperand, other: VqOperand) -> tuple[VqBook, ...]:
    pairs = zip(first.books, other.books, strict=True)
    return tuple(replace(theirs, fragments=mine.fragments) for mine, theirs in pairs)


def _operands(bench: Bench, mixture: MixtureShape) -> Operands:
    hidden, width, active = mixture.hidden, mixture.width, mixture.entries
    dtype = _dtype(mixture)
    per_layer = active * hidden * width  # bytes of down, about half of what a launch of gate and up reads
    turns = bench.copies(per_layer // 2)
    count = min(turns * active, expert_kernel.MOST_EXPERTS)
    chosen = torch.arange(count, dtype=torch.int32, device=bench.device)
    x = bench.normal(1, hidden, dtype=dtype)
    return Operands(
        x,
        Norm(1 + 0.1 * bench.normal(hidden, seed=SEED + 1).to(dtype), EPS),
        _stack(bench, mixture, count, 2 * width, hidden, SEED + 2),
        _stack(bench, mixture, count, hidden, width, SEED + 3),
        [each.clone() for each in torch.split(chosen, active) if len(each) == active],
        torch.full((active,), 1 / active, device=bench.device),
        bench.normal(active, width, dtype=dtype, seed=SEED + 4),
        torch.empty_like(x),
    )


def _dense(stack: Stack, chosen: Tensor, dtype: torch.dtype) -> list[Tensor]:
    if isinstance(stack, TableStack):
        matrices = [stack.matrices[index] for index in chosen.tolist()]
        return [torch.cat([_weights_of(each) for each in some]).to(dtype) for some in matrices]
    _, out, columns = shape_of(stack)
    empty = [torch.empty(out, columns, dtype=dtype, device=chosen.device) for _ in chosen]
    return [
        expert_kernel.experts_dequantize(stack, index, to) for index, to in zip(chosen.tolist(), empty, strict=True)
    ]


def _op(mixture: MixtureShape, op: str) -> str:
    return OPERATIONS.get(mixture.format, {}).get(op, op)


def _dtype(mixture: MixtureShape) -> torch.dtype:
    return MXFP4_DTYPE if mixture.format in STACKS else HALF


def gate_up_row(bench: Bench, mixture: MixtureShape) -> Row:
    """One `experts_gate_up`, checked and timed."""
    of, op, what = _operands(bench, mixture), _op(mixture, "experts_gate_up"), f"{mixture.name}, gate and up"
    chosen = of.turns[0]

    def gated(both: Tensor) -> Tensor:
        first, second = (both[..., 0::2], both[..., 1::2]) if mixture.interleaved else both.chunk(2, -1)
        if mixture.gate == "silu":
            return F.silu(first) * second
        first, second = first.clamp(max=7.0), second.clamp(-7.0, 7.0)
        return first * torch.sigmoid(1.702 * first) * (second + 1)

    wide = of.x.double()
    wide = wide * torch.rsqrt(wide.square().mean() + EPS) * of.norm.weight.double()
    exact = gated(torch.cat([wide @ each.double().T for each in _dense(of.gate_up, chosen, torch.float32)]))
    normed = F.rms_norm(of.x, of.x.shape[-1:], None, EPS) * of.norm.weight
    naive = gated(torch.cat([F.linear(normed, each) for each in _dense(of.gate_up, chosen, of.x.dtype)]))
    of.run_gate_up(chosen, mixture)
    check(op, what, of.gated, exact, naive)
    timing = bench.time([partial(of.run_gate_up, each, mixture) for each in of.turns])
    moved = expert_kernel.experts_gate_up_bytes(of.gate_up, mixture.entries)
    return Row("experts", op, what, 1, type_name(of.x.dtype), moved, timing)


def down_row(bench: Bench, mixture: MixtureShape) -> Row:
    """One `experts_down`, checked and timed."""
    of, op, what = _operands(bench, mixture), _op(mixture, "experts_down"), f"{mixture.name}, down"
    chosen = of.turns[0]
    exact, naive = of.x[0].double() * mixture.entries, of.x[0] * mixture.entries
    for row, wide, narrow in zip(
        of.gated, _dense(of.down, chosen, torch.float32), _dense(of.down, chosen, of.x.dtype), strict=True
    ):
        exact, naive = exact + row.double() @ wide.double().T, naive + F.linear(row, narrow)
    of.run_down(chosen)
    check(op, what, of.out[0], exact / mixture.entries, naive / mixture.entries)
    timing = bench.time([partial(of.run_down, each) for each in of.turns])
    moved = expert_kernel.experts_down_bytes(of.down, mixture.entries)
    return Row("experts", op, what, 1, type_name(of.x.dtype), moved, timing)


class Routed:
    """The router of a mixture, and where its choice goes."""

    def __init__(self, bench: Bench, mixture: MixtureShape, x: Tensor, norm: Norm) -> None:
        self._given, self._norm, self._active = (x, None, mixture.active), norm, mixture.active
        self._workspace = expert_kernel.router_workspace(mixture.experts, bench.device)
        self.weights = torch.empty(mixture.entries, device=bench.device)
        self.chosen = torch.empty(mixture.entries, dtype=torch.int32, device=bench.device)
        gate = bench.normal(1, mixture.hidden, seed=SEED + 6) / mixture.hidden**0.5
        self.shared_gate = gate.to(x.dtype) if mixture.shared else None

    @property
    def logits(self) -> Tensor:
        """f32 [E] of the last run."""
        return self._workspace[1:].view(torch.float32)

    def run(self, weight: Tensor) -> None:
        """One launch."""
        x, bias, active = self._given
        expert_kernel.router(
            x, weight, bias, active, norm=self._norm, how="softmax_of_chosen", weights=self.weights,
            chosen=self.chosen, workspace=self._workspace, shared_gate=self.shared_gate,
        )  # fmt: skip


def _routers(bench: Bench, mixture: MixtureShape, dtype: torch.dtype) -> list[Tensor]:
    weight = bench.normal(mixture.experts, mixture.hidden, seed=SEED + 5) / mixture.hidden**0.5
    return list(clones(weight.to(dtype), bench.copies(mixture.experts * mixture.hidden * 2)))


def router_row(bench: Bench, mixture: MixtureShape) -> Row:
    """One `router`, checked and timed."""
    dtype = _dtype(mixture)
    x, norm = bench.normal(1, mixture.hidden, dtype=dtype), bench.normal(mixture.hidden, dtype=dtype, seed=SEED + 1)
    routed, weights = Routed(bench, mixture, x, Norm(norm, EPS)), _routers(bench, mixture, dtype)
    what = f"{mixture.name}, {mixture.active} of {mixture.experts}{' and a shared one' if mixture.shared else ''}"
    normed = F.rms_norm(x, x.shape[-1:], None, EPS) * norm
    routed.run(weights[0])
    exact = normed.double() @ weights[0].double().T
    check("router", what, routed.logits[None], exact, F.linear(normed, weights[0]))
    if not torch.equal(routed.chosen[: mixture.active].long(), routed.logits.topk(mixture.active).indices):
        raise wrong("router", what, "the selected experts do not have the largest logits")
    if (gate := routed.shared_gate) is not None:
        share = torch.sigmoid(normed.double() @ gate.double().T)[0]
        off = (routed.weights[mixture.active :] - share).abs() > 4 * torch.finfo(dtype).eps  # logit and sigmoid round
        if off or routed.chosen[mixture.active] != mixture.experts:
            raise wrong("router", what, "the shared expert is missing")
    timing = bench.time([partial(routed.run, weight) for weight in weights])
    moved = expert_kernel.router_bytes(mixture.experts, mixture.hidden, shared=mixture.shared)
    return Row("experts", "router", what, 1, type_name(dtype), moved, timing)


def route_row(bench: Bench, mixture: MixtureShape) -> Row:
    """One `route`, checked and timed."""
    logits = bench.normal(1, mixture.experts)
    weights = torch.empty(mixture.active, device=bench.device)
    chosen = torch.empty(mixture.active, dtype=torch.int32, device=bench.device)
    run = partial(expert_kernel.route, logits, mixture.active, how="softmax_of_chosen", weights=weights, chosen=chosen)
    what = f"{mixture.active} of {mixture.experts}"
    run()
    if not torch.equal(chosen.long(), logits[0].topk(mixture.active).indices):
        raise wrong("route", what, "the selected experts do not have the largest logits")
    return Row("experts", "route", what, 1, "float32", logits.nbytes, bench.time([run, run]))


def mixture_row(bench: Bench, mixture: MixtureShape) -> Row:
    """Three launches: router, gate and up, down; the router's choice is not used, so that experts take turns."""
    of = _operands(bench, mixture)
    routed, weights = Routed(bench, mixture, of.x, of.norm), _routers(bench, mixture, of.x.dtype)

    def run(chosen: Tensor, weight: Tensor) -> None:
        routed.run(weight)
        of.run_gate_up(chosen, mixture)
        of.run_down(chosen, behind_gate_up=True)

    launches = [partial(run, chosen, weights[i % len(weights)]) for i, chosen in enumerate(of.turns)]
    moved = expert_kernel.experts_gate_up_bytes(of.gate_up, mixture.entries)
    moved += expert_kernel.router_bytes(mixture.experts, mixture.hidden, shared=mixture.shared)
    moved += expert_kernel.experts_down_bytes(of.down, mixture.entries)
    what = f"{mixture.name}, complete layer"
    return Row("experts", "mixture", what, 1, type_name(of.x.dtype), moved, bench.time(launches))


def grouped_row(bench: Bench, mixture: MixtureShape, tokens: int, op: str) -> Row:
    """One launch for the experts of a prompt's layer, of `experts_gemm` gate and up and then down; the experts' entries
    are about as many. Checked by one expert's down."""
    dtype, active, what = _dtype(mixture), mixture.active, f"{mixture.name}, {tokens} tokens"
    gate_up = _stack(bench, mixture, mixture.experts, 2 * mixture.width, mixture.hidden, SEED + 2)
    down = _stack(bench, mixture, mixture.experts, mixture.hidden, mixture.width, SEED + 3)
    x = bench.normal(tokens, mixture.hidden, dtype=dtype)
    scores = bench.normal(tokens, mixture.experts, seed=SEED + 7)
    weights, chosen = torch.softmax(scores, -1).topk(active, -1)
    products = [grouped.ExpertsGemm(stack, dtype) for stack in (gate_up, down)]
    gate, entries = grouped.Gate(mixture.gate, mixture.interleaved), grouped.experts_sort(chosen, mixture.experts)
    gated = torch.empty(entries.count, mixture.width, dtype=dtype, device=bench.device)
    each = torch.empty(entries.count, mixture.hidden, dtype=dtype, device=bench.device)
    out = torch.empty_like(x)

    def multiply() -> None:
        products[0](x, None, entries, gate=gate, out=gated)
        products[1](gated, None, entries, gate=None, out=each)

    multiply()
    expert = int(chosen[0, 0])
    first, last = ([0, *entries.ends.tolist()][at] for at in (expert, expert + 1))
    of = torch.tensor([expert], device=bench.device)
    exact = gated[first:last].double() @ _dense(down, of, torch.float32)[0].double().T
    check("experts_gemm", what, each[first:last], exact, F.linear(gated[first:last], _dense(down, of, dtype)[0]))
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "experts_sort": (lambda: grouped.experts_sort(chosen, mixture.experts), 16 * entries.count),
        "experts_gemm": (multiply, sum(
            grouped.experts_gemm_bytes(stack, entries.count, gated=stack is gate_up) for stack in (gate_up, down)
        )),
        "experts_sum": (lambda: grouped.experts_sum(each, entries, weights, out), each.nbytes + out.nbytes),
    }  # fmt: skip
    run, moved = runs[op]
    return Row("experts", op, what, tokens, type_name(dtype), moved, bench.time([run, run]))
