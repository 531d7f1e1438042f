"""What an error in each matrix costs at the end of the model: measured once, to decide where bits are worth most.

An error E of a matrix [out, in] changes its output y by E x. To second order, and where neither rows nor tokens
conspire, the distribution of the next token then moves by

KL = 1/2 sum over rows r of  mean(g_r^2) * (E H E^T)_rr        H = mean(x^T x)

nats a token; g is the gradient to y of the log-probability of words that the model itself draws, so that its squares
are those of the Fisher information: one pass through the model and one back. What a search with feedback leaves of a
row r of mean square s_r, with codebooks that leave the part e of noise, is e * s_r * sum of V_ii^2 where H = V V^T, V
upper triangular. So e times

    sensitivity = 1/2 sum of V_ii^2 * sum over r of mean(g_r^2) s_r

is the price of a group of matrices, for every e. The search by sub-layers of nuQmm (Park et al. 2022, arXiv 2206.09557)
quantizes each of them and reads the text again, which takes as many passes as there are layers, kinds and sizes.

Set against that on smollm2-135m, where 36 groups of nine layers were quantized to 2 bits one at a time: the KL was 0.75
to 4.2 times the price (medians by kind: q, k and v 1.3, o 2.2, gate and up 1.7, down 2.0: tokens do conspire a little),
with a rank correlation of 0.94; of one group the factor changed by 1.3 at most between 2 and 4 bits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from localq.errors import bad_file
from localq.models.decoder import Block, Decoder
from localq.quantize.model import linear_algebra
from localq.quantize.model.calibration_stream import Streams
from localq.quantize.model.fold import plain_linear
from localq.quantize.model.matrix_groups import Group, groups_of
from localq.quantize.model.source import SourceModel
from localq.quantize.model.statistics import F64_COLUMNS, rotate_metric_
from localq.quantize.output.sensitivity_log import MeasuringState, SensitivityLog
from localq.quantize.settings import ConversionSettings

WINDOWS, TRACED = 16, 4  # of the text, for the metrics; of these for the gradients
HELD_BYTES = 4 * 2**30  # of what the layers read of the traced ones, on the disk
HEAD_BYTES = 2**26  # of logits at a time, in f32: what is made of them takes seven times as much
OnStep = Callable[[Sequence[int]], None]
Ending = tuple[nn.Module, Tensor, float]  # norm, head [vocab, hidden], soft cap of the logits (0 = none)


def sensitivities(
    model: SourceModel,
    begin: Callable[[], list[Tensor]],
    device: torch.device,
    settings: ConversionSettings,
    trail: SensitivityLog,
    before: OnStep,
    *,
    feedback: bool = True,
) -> list[list[float]]:
    """Of each layer its four groups (`matrix_groups.groups_of`), in nats a token for weights that are lost altogether.

    begin   the text as the first layer reads it, by window [T, hidden]; not asked where `trail` is beyond that
    before  is called with the numbers of what is still to be read of the source, before each of it: 0 for the
            embedding, then layers from 1, then the head as one more, and the layers back again; at the end with none
    feedback: codes are searched so that an error makes up for those before; else V_ii^2 above are H_ii.

    Raises LocalqError: exit 8 for damaged weights, 9 for the disk.
    """
    point, way = trail.found(), reading_order(model.layers)
    if point is None:
        before(way)
        rows = begin()
        point = trail.begin(rows, _traced(rows, model.layers), model.layers)
    model.model.make_tables(len(point.rows[0]), device)
    streams = Streams(model.model, point.rows, device)
    if not point.back:
        for layer in range(point.layer, model.layers):
            before(way[1 + layer :])
            _forward_layer(model, layer, streams, settings, trail, feedback)
        before(way[1 + model.layers :])
        point = _start_backward(model, streams, trail)
    while point.layer >= 0:
        before(way[len(way) - 1 - point.layer :])
        _backward_layer(model, point, streams, trail)
    before([])
    if not all(math.isfinite(each) for layer in point.prices for each in layer):
        why = "on the calibration text the model computes values that are not finite"
        raise bad_file("weights", why, "Fetch the model again.")
    return point.prices[::-1]


def reading_order(layers: int) -> list[int]:
    """What is read of the source, in this order; see `before` of `sensitivities`."""
    return [*range(layers + 2), *range(layers, 0, -1)]


def _traced(text: list[Tensor], layers: int) -> int:
    """Of how many windows what layers read is kept."""
    return min(TRACED, len(text), max(1, HELD_BYTES // (layers * 4 * text[0].numel())))


def _forward_layer(
    model: SourceModel,
    layer: int,
    streams: Streams,
    settings: ConversionSettings,
    trail: SensitivityLog,
    feedback: bool,
) -> None:
    """Take the full text through a layer."""
    read = [x.clone() for x in streams.full[: _traced(streams.full, model.layers)]]
    energies = _forward(model.block(layer), layer, streams, settings, feedback)
    trail.passed(layer, read, energies, streams.full)


def _start_backward(model: SourceModel, streams: Streams, trail: SensitivityLog) -> MeasuringState:
    """From the text behind the last layer to the slopes there."""
    ending, text = make_ending(model.model, *model.ending(), streams.device), streams.full
    traced = text[: _traced(text, model.layers)]
    slopes = [_slope_of_end(ending, x, seed) for seed, x in enumerate(traced)]
    point = MeasuringState(slopes, model.layers - 1, back=True)
    trail.reach(point)
    return point


def _backward_layer(model: SourceModel, point: MeasuringState, streams: Streams, trail: SensitivityLog) -> None:
    """Take the slopes of `point` back through its layer, which gets its prices."""
    text, energies = trail.layer(point.layer)
    squares = _backward(model.block(point.layer), text, point.rows, streams)
    point.prices.append([float(square @ energy) / 2 for square, energy in zip(squares, energies, strict=True)])
    point.layer -= 1
    trail.reach(point)


def spread_indices(count: int, most: int = WINDOWS) -> list[int]:
    """Numbers of at most `most` of so many windows, from all over the text."""
    wanted = min(count, most)
    return [index * count // wanted for index in range(wanted)]


def _forward(block: Block, index: int, streams: Streams, settings: ConversionSettings, feedback: bool) -> list[Tensor]:
    """Take the full text through a layer; of each group f64 [rows]: mean squares of the weights times sum of V_ii^2."""
    groups, device = groups_of(block), streams.device
    readers = [group_linears(block, group)[0] for group in groups]
    moments = [torch.zeros(each.in_features, each.in_features, device=device) for each in readers]
    tokens = 0
    with inputs_of(readers) as read:
        for number, x in enumerate(streams.full):
            out = block(x.to(device, torch.float32).clone(), streams.step)
            streams.full[number].copy_(out)
            tokens += len(out)
            for total, linear in zip(moments, readers, strict=True):
                total.addmm_(read[linear].T, read[linear])
    return [_energy(block, group, moments.pop(0), tokens, index, settings, feedback) for group in groups]


def _energy(
    block: Block, group: Group, metric: Tensor, tokens: int, index: int, settings: ConversionSettings, feedback: bool
) -> Tensor:
    """metric: sums over so many tokens; it is used up."""
    linear_algebra.mean_transpose_(metric, 2 * tokens)
    signs = group.signs(len(metric), index, settings)
    if signs is not None:
        rotate_metric_(metric, signs.to(metric.device))
    rows = torch.cat([linear.weight.square().mean(1) for linear in group_linears(block, group)])
    if not feedback:
        return rows.double().cpu() * float(metric.diagonal().double().sum())
    return rows.double().cpu() * _left_by_feedback(metric, settings.effort.damping)


def _left_by_feedback(metric: Tensor, damping: float) -> float:
    """Sum of V_ii^2, of a damped metric = V V^T; its trace, which feedback lessens, where rounding hides V."""
    upper = metric.double() if len(metric) <= F64_COLUMNS else metric
    upper.diagonal().add_(damping * upper.diagonal().mean())
    trace = float(upper.diagonal().double().sum())
    return float(upper.diagonal().double().square().sum()) if linear_algebra.factor_(upper) else trace


def _slope_of_end(ending: Ending, x: Tensor, seed: int) -> Tensor:
    """Gradient, to x [T, hidden] behind the last layer, of the log-probability of words drawn by what it predicts."""
    _, head, _ = ending
    device = head.device
    draws = torch.rand(len(x), generator=torch.Generator().manual_seed(seed))
    rows = max(1, HEAD_BYTES // (4 * len(head)))
    slopes = []
    for part, drawn in zip(torch.split(x, rows), torch.split(draws, rows), strict=True):
        with torch.inference_mode(False), torch.enable_grad():
            leaf = part.to(device, torch.float32).clone().requires_grad_()
            likely = torch.log_softmax(logits(ending, leaf), -1)
            shares = likely.detach().exp().double().cumsum(-1)
            aim = drawn.to(device).double()[:, None] * shares[:, -1:]
            words = torch.searchsorted(shares, aim).clamp_max(len(head) - 1)
            torch.autograd.backward(likely.gather(1, words).sum())
        assert leaf.grad is not None
        slopes.append(leaf.grad)
    return torch.cat(slopes).cpu()


def logits(ending: Ending, x: Tensor) -> Tensor:
    """f32 [T, vocab] of a stream [T, hidden] behind the last layer."""
    norm, head, cap = ending
    found: Tensor = norm(x) @ head.T
    return torch.tanh(found / cap) * cap if cap else found


def make_ending(model: Decoder, scale: Tensor, head: Tensor, device: torch.device) -> Ending:
    """On the device, in f32. scale: of the last norm; head [vocab, hidden]."""
    norm = copy.deepcopy(model.norm).to_empty(device=device).float()
    norm.weight = nn.Parameter(scale.to(device).float(), requires_grad=False)
    norm.finish()
    return norm, head.to(device).float(), model.config.final_softcap


def _backward(block: Block, text: list[Tensor], slopes: list[Tensor], streams: Streams) -> list[Tensor]:
    """Take the slopes back through a layer, in place; of each group f64 [rows], mean squares of those to its output."""
    groups, device = groups_of(block), streams.device
    linears = [group_linears(block, group) for group in groups]
    sums: dict[nn.Module, Tensor] = {
        each: torch.zeros(each.out_features, device=device) for group in linears for each in group
    }
    tokens = 0
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),  # the others add as threads come
        _outputs(sums),
    ):
        for number, x in enumerate(text):
            leaf = x.to(device, torch.float32).clone().requires_grad_()
            out = block(leaf.clone(), streams.step)
            torch.autograd.backward(out, slopes[number].to(device))
            assert leaf.grad is not None
            slopes[number] = leaf.grad.cpu()
            tokens += len(x)
    return [torch.cat([sums[each] for each in group]).double().cpu() / tokens for group in linears]


def group_linears(block: Block, group: Group) -> list[nn.Linear]:
    """The linears of a group."""
    return [plain_linear(block.get_submodule(name)) for name in group.names]


@contextmanager
def inputs_of(linears: Sequence[nn.Linear]) -> Iterator[dict[nn.Module, Tensor]]:
    """What each read last."""
    read: dict[nn.Module, Tensor] = {}

    def look(linear: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        read[linear] = arguments[0]

    handles = [linear.register_forward_pre_hook(look) for linear in linears]
    try:
        yield read
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _outputs(sums: Mapping[nn.Module, Tensor]) -> Iterator[None]:
    """Adds up the squared slopes to what each gives, over tokens, as they come back."""

    def look(linear: nn.Module, arguments: tuple[Tensor, ...], out: Tensor) -> None:
        total = sums[linear]

        def add(slope: Tensor) -> None:
            total.add_(slope.square().sum(0))

        out.register_hook(add)  # type: ignore[no-untyped-call]

    handles = [linear.register_forward_hook(look) for linear in sums]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
