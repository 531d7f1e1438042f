"""Predict how fast a model decodes, from measured times of its kernels (`measurements`). Torch-free.

The time of a launch is  fixed + per_column * columns + bytes / (efficiency * rate),  fitted by format to the measured
launches. The rate is the read bandwidth; for gathered codewords (1x16, VPTQ) it is that of random sectors of L2. The
residual of the fit (`fit_residual`), such as from how a matrix divides into tiles, is interpolated between near shapes.
The time of a step is the sum of its launches.

All times were measured on an H200. For another card the efficiency is assumed to be the same, though every card in
`cards` has more cycles per byte and might reach a higher one. The other terms are latency, which bandwidth does not
change; they are assumed equal, or longer by the clock. So small launches reach a larger share of the bandwidth on a
slower card. Gathers scale as a whole, because their fixed part is work of the multiprocessors too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from localq import kv_bits
from localq.files import format_facts, layer_caches
from localq.files.architecture import Architecture
from localq.files.format_facts import Format
from localq.files.linears import Linears
from localq.kv_bits import KvBits
from localq.planner import footprint
from localq.planner.placement import STORED, Placement
from localq.planner.speed import measurements
from localq.planner.speed.cards import Card
from localq.planner.speed.measurements import Variant


def least_squares(points: Sequence[tuple[float, ...]], values: Sequence[float]) -> tuple[float, float, float]:
    """Non-negative coefficients for `points` that minimize the squared relative errors to `values`.

    Tries every subset of the three coefficients, with the others 0.
    """
    scaled = [[each / value for each in point] for point, value in zip(points, values, strict=True)]
    best, least = (0.0, 0.0, 0.0), float(len(values))
    for size in (1, 2, 3):
        for chosen in combinations((2, 1, 0), size):  # among equal fits, prefer the term of bytes
            found = _solve([[row[index] for index in chosen] for row in scaled])
            if found is None or min(found) < 0:
                continue
            full = [0.0, 0.0, 0.0]
            for index, value in zip(chosen, found, strict=True):
                full[index] = value
            error = sum((sum(a * b for a, b in zip(row, full, strict=True)) - 1) ** 2 for row in scaled)
            if error < least - 1e-9:
                best, least = (full[0], full[1], full[2]), error
    return best


def _solve(rows: list[list[float]]) -> list[float] | None:
    """x that minimizes |`rows` x - 1|, by the normal equations; None if they have no unique solution."""
    size = len(rows[0])
    table = [[sum(r[i] * r[j] for r in rows) for j in range(size)] + [sum(r[i] for r in rows)] for i in range(size)]
    for i in range(size):
        pivot = table[i][i]
        if pivot <= 1e-12 * max(abs(each) for each in table[i]):
            return None
        table[i] = [each / pivot for each in table[i]]
        for j in range(size):
            if j != i:
                table[j] = [a - table[j][i] * b for a, b in zip(table[j], table[i], strict=True)]
    return [line[-1] for line in table]


INT8 = "int8"  # format of an 8-bit head
NEAREST = 1e-3  # squared octaves: nearer shapes get equal weight
LIVE = 64.5  # slots that attention reads: the mean over 128 tokens from an empty context


@dataclass(frozen=True)
class Machine:
    """Speed of a card: bytes per second read from device memory, and gathered from L2 in random sectors.

    latency   of a launch, relative to an H200
    """

    read_bytes_per_s: float
    gather_bytes_per_s: float
    latency: float = 1.0

    @classmethod
    def of(cls, card: Card | None, read_bytes_per_s: float | None = None) -> Machine:
        """The machine of a card, with a measured bandwidth or the expected one.

        L2 scales with multiprocessors and clock, at most to that of an H200; for an unknown card with the bandwidth.
        Latency scales with the clock, at least to that of an H200.
        """
        assert card is not None or read_bytes_per_s is not None
        read = read_bytes_per_s or (card.read_bytes_per_s if card else 0.0)
        there = measurements.load()
        if card is None:
            return cls(read, there.gather_bytes_per_s * min(1.0, read / there.read_bytes_per_s))
        share = card.multiprocessors * card.boost_ghz / there.multiprocessor_ghz
        latency = max(1.0, there.clock_ghz / card.boost_ghz)
        return cls(read, there.gather_bytes_per_s * min(1.0, share), latency)


def reference_machine() -> Machine:
    """The card that all times were measured on."""
    return Machine(measurements.load().read_bytes_per_s, measurements.load().gather_bytes_per_s)


@dataclass(frozen=True)
class Cost:
    """Cost of a kernel: us per launch, us per column, and a factor for the time of bytes (1 / efficiency)."""

    fixed_us: float
    column_us: float
    times: float

    def us(self, columns: float, count: float, machine: Machine) -> float:
        """Time of a launch that reads `count` bytes; the module docstring explains other cards."""
        latency = machine.latency * (self.fixed_us + self.column_us * columns)
        return latency + self.times * 1e6 * count / machine.read_bytes_per_s

    def gather_us(self, columns: float, count: float, machine: Machine) -> float:
        """Time of a launch that gathers `count` bytes of sectors."""
        rate = measurements.load().gather_bytes_per_s
        there = self.fixed_us + self.column_us * columns + self.times * 1e6 * count / rate
        return there * rate / machine.gather_bytes_per_s


def tokens_per_s(
    arch: Architecture, format: str, scheme: str, placement: Placement, machine: Machine, live: float = LIVE
) -> float | None:
    """Predicted decoding speed with `live` positions in use.

    None if no kernel of the format was measured, or none for its experts, or if there is none for a part of it.
    """
    kernel = format_facts.of(format).speed_key(scheme)
    if kernel is None or arch.traits.no_kernel or (arch.experts and not _of_experts(arch, format, scheme)):
        return None
    return 1e6 / sum(_launches(arch, format, scheme, placement, machine, live))


def _of_experts(arch: Architecture, format: str, scheme: str) -> bool:
    """Return whether products with chosen experts were measured in this format."""
    kernel = format_facts.of_experts(arch, format).speed_key(scheme)
    return kernel == "16 bit" or f"{kernel} experts" in measurements.load().products


def bytes_per_token(arch: Architecture, format: str, scheme: str, placement: Placement) -> int:
    """Bytes that a step reads: weights (of experts those of one token), head, one row of the table."""
    blocks = footprint.placed_weights(arch, format, scheme) - footprint.idle_bytes(arch, format, scheme)
    head = footprint.head_bytes(arch, placement.head) or 2 * arch.embedding_parameters
    return blocks + head + 2 * arch.hidden


def _launches(
    arch: Architecture, format: str, scheme: str, placement: Placement, machine: Machine, live: float
) -> Iterator[float]:
    """Microseconds of the launches of a step; equal launches are summed."""
    q, kv, attentions = arch.query_columns, arch.kv_heads * arch.head_dim, arch.layers - arch.recurrent_layers
    around = format_facts.outside_experts(arch, format)
    shapes = [(arch.query_rows + 2 * kv, arch.hidden), (arch.hidden, q)]
    shapes += [(q, arch.hidden)] if arch.traits.attention_gate else []
    yield attentions * _products(shapes, around, scheme, machine)
    windowed = arch.window_layers if arch.window else 0
    for layers, slots in ((attentions - windowed, live), (windowed, min(live, arch.window))):
        yield layers * _attention(arch, placement.kv_bits, slots, machine)
    recurrent = _convolution if arch.conv_kernel else _delta_net
    yield arch.recurrent_layers * recurrent(arch, around, scheme, machine) if arch.recurrent_layers else 0.0
    yield arch.layers * machine.latency * _between(arch, format, scheme)
    width, dense = arch.intermediate, arch.plain_layers
    yield dense * _products(((2 * width, arch.hidden), (arch.hidden, width)), around, scheme, machine) if dense else 0.0
    yield arch.expert_layers * _mixture(arch, format, scheme, machine) if arch.experts else 0.0
    if (shared := arch.shared_intermediate) and arch.experts and not format_facts.stacks_shared(arch, format):
        shapes = [(2 * shared, arch.hidden), (arch.hidden, shared)]
        yield arch.expert_layers * _products(shapes, around, scheme, machine)
    yield _head(arch, placement.head, machine)
    yield machine.latency * measurements.load().embed_and_choice_us


def _convolution(arch: Architecture, format: Format, scheme: str, machine: Machine) -> float:
    """Time of a short convolution: two products, and torch's launches, each counted as a norm's."""
    shapes = ((3 * arch.hidden, arch.hidden), (arch.hidden, arch.hidden))
    launches = 7 + arch.conv_kernel
    return _products(shapes, format, scheme, machine) + launches * machine.latency * measurements.load().norm_us


def _delta_net(arch: Architecture, format: Format, scheme: str, machine: Machine) -> float:
    """Time of a gated delta net. Its rule has a latency, and moves the state twice and the rows of its rates once."""
    shapes = ((arch.delta_channels + arch.delta_columns, arch.hidden), (arch.hidden, arch.delta_columns))
    moved = 2 * layer_caches.state_bytes(arch.layer_caches, 2) / arch.recurrent_layers
    moved += 2 * 2 * arch.delta_value_heads * arch.hidden
    rule = machine.latency * measurements.load().delta_us + 1e6 * moved / machine.read_bytes_per_s
    return _products(shapes, format, scheme, machine) + rule


def _mixture(arch: Architecture, format: str, scheme: str, machine: Machine) -> float:
    """Time of the router and of the chosen experts: gate and up, and down, as one product each.

    A shared expert is one more of them, or has products of its own (`format_facts.stacks_shared`).
    """
    own, width = format_facts.of_experts(arch, format), arch.expert_intermediate
    active = arch.experts_active + format_facts.stacks_shared(arch, format)
    opened = _product(2 * active * width, arch.hidden, own, scheme, machine, expert=True)
    closed = _product(active * arch.hidden, width, own, scheme, machine, expert=True)
    known = measurements.load()
    torch_us = 8 * known.norm_us * arch.traits.sigmoid_router  # of the choice
    return machine.latency * (known.router_us + arch.experts * known.router_expert_us + torch_us) + opened + closed


def _products(shapes: Sequence[tuple[int, int]], format: Format, scheme: str, machine: Machine) -> float:
    return sum(_product(rows, columns, format, scheme, machine) for rows, columns in shapes)


def _product(rows: int, columns: int, format: Format, scheme: str, machine: Machine, expert: bool = False) -> float:
    kernel = format.speed_key(scheme)
    assert kernel is not None
    if expert and f"{kernel} experts" in measurements.load().products:
        kernel = f"{kernel} experts"
    return launch_us(kernel, rows, columns, Variant(format.name, scheme, expert), machine)


def _head(arch: Architecture, head: str, machine: Machine) -> float:
    kernel = {"16": "16 bit", "8": "8 bit", "nf4": "nf4", STORED: "8 bit"}[head]
    return launch_us(kernel, arch.vocab, arch.hidden, measurements.load().variant(kernel), machine)


def launch_us(kernel: str, rows: int, columns: int, variant: Variant, machine: Machine) -> float:
    """Microseconds of a product with a matrix [rows, columns], from measurements of `kernel`."""
    cost, moved = fit_cost(kernel), _moved_bytes(rows, columns, variant)
    off = fit_residual(kernel, rows, columns)
    return off * (cost.gather_us if _gathers(variant) else cost.us)(columns, moved, machine)


def _gathers(variant: Variant) -> bool:
    """Return whether the codewords of `variant` are gathered from L2."""
    return variant.format != INT8 and format_facts.of(variant.format).gathered_bytes(1, 1, variant.scheme) > 0


def _moved_bytes(rows: int, columns: int, variant: Variant) -> int:
    """Bytes of one measured product: of the weights, or of the gathered sectors."""
    if variant.format == INT8:
        return rows * columns
    format = format_facts.of(variant.format)
    gathered = format.gathered_bytes(rows, columns, variant.scheme)
    return gathered or format.placed_bytes(Linears("", rows, columns, 1, variant.expert), variant.scheme)


def _between(arch: Architecture, format: str, scheme: str) -> float:
    """Time of a layer without products and attention: other norms, rotations, further tables of AQLM."""
    norms_behind, own, known = arch.traits.norms_behind, format_facts.of(format), measurements.load()
    spent = 2 * known.norm_us * (norms_behind + arch.traits.wide_norms)
    spent += known.norm_us * arch.traits.two_head_sizes  # of the values
    if own.rotates_inputs:  # for down; with post-norms for all but o, whose input is rotated with the values
        spent += known.rotation_us * (3 if norms_behind else 1)
    if own.own_codebooks and not own.gathered_bytes(1, 1, scheme):  # k, v and up
        spent += 3 * known.own_codebooks_us
    return spent


def _attention(arch: Architecture, bits: KvBits, live: float, machine: Machine) -> float:
    if isinstance(bits, str):  # different bits for keys and values were not measured: assume half of each
        return sum(_attention(arch, part, live, machine) for part in kv_bits.split(bits)) / 2
    cost = fit_attention(bits)
    moved = arch.kv_heads * kv_bits.pair_bytes(arch.head_dim, bits) * live
    of_heads = (arch.traits.qk_norm and not arch.traits.wide_norms) or arch.traits.constant_norms
    norms = measurements.load().qk_norm_us if of_heads else 0.0
    return machine.latency * norms + cost.us(arch.heads * arch.head_dim, moved, machine)


# ---- costs from measurements


@functools.cache
def _points(kernel: str) -> list[tuple[float, ...]]:
    """For every measured launch: 1, columns, and us of its bytes at the measured rate."""
    known = measurements.load()
    variant = known.variant(kernel)
    rate = known.gather_bytes_per_s if _gathers(variant) else known.read_bytes_per_s
    return [
        (1.0, columns, 1e6 * _moved_bytes(out, columns, variant) / rate) for out, columns, _ in known.products[kernel]
    ]


@functools.cache
def fit_cost(kernel: str) -> Cost:
    """The cost with the least relative error over all measured launches of `kernel`.

    A single launch does not separate bytes from latency: then the efficiency is that of the format's experts.
    """
    experts = f"{kernel} experts"
    if len(measurements.load().products[kernel]) == 1 and experts in measurements.load().products:
        (*_, us), (*_, moved) = measurements.load().products[kernel][0], _points(kernel)[0]
        return Cost(us - fit_cost(experts).times * moved, 0.0, fit_cost(experts).times)
    return Cost(*least_squares(_points(kernel), [us for *_, us in measurements.load().products[kernel]]))


@functools.cache
def fit_residual(kernel: str, rows: int, columns: int, without: tuple[int, int] | None = None) -> float:
    """Time of a matrix divided by its fitted cost: the weighted geometric mean over the measured shapes.

    The weight is the inverse fourth power of the distance in octaves of rows and columns (D. Shepard, A two-dimensional
    interpolation function for irregularly-spaced data, 1968). `without`: a shape to leave out.
    """
    cost, total, weights = fit_cost(kernel), 0.0, 0.0
    for (out, inner, us), point in zip(measurements.load().products[kernel], _points(kernel), strict=True):
        if (out, inner) != without:
            apart = math.log2(rows / out) ** 2 + math.log2(columns / inner) ** 2
            near = (apart + NEAREST) ** -2
            weights += near
            fit = cost.fixed_us + cost.column_us * point[1] + cost.times * point[2]
            total += near * math.log(us / fit)
    return math.exp(total / weights) if weights else 1.0


@functools.cache
def fit_attention(bits: int) -> Cost:
    """The cost of attention with a cache of so many bits.

    The cost of query heads was measured only at 16 bits.
    """
    rows = [(heads * 128, slots, us) for of, heads, slots, us in measurements.load().attention if of == bits]
    moved = 2 * 8 * (128 * bits // 8 + (0 if bits == 16 else 8))  # bytes of a slot: k and v of 8 heads, and scales
    points = [(1.0, columns, 1e6 * slots * moved / measurements.load().read_bytes_per_s) for columns, slots, _ in rows]
    if bits == 16:
        return Cost(*least_squares(points, [us for *_, us in rows]))
    of_columns = fit_attention(16).column_us
    rest = [us - of_columns * columns for columns, _, us in rows]
    fixed, _, times = least_squares([(one, 0.0, time) for one, _, time in points], rest)
    return Cost(fixed, of_columns, times)
