"""Binary-coding quantization layer by layer on a text: every matrix on the input that the matrices before it leave.

The text runs through the source model and through the quantized one. `model/statistics.py` turns both into the metric
of a matrix and its target, which compensates for earlier losses; `binary/matrix.py` finds the codes. Nothing is
rotated, so everything else stays as it is, and so do matrices whose row length the format cannot store.

A conversion requests its matrices in the order of the layers (`LayerCodes.codes`). A resumed one runs the text through
the finished layers with their written weights, and quantizes an unfinished layer again, so the result is the same. The
device holds both copies of a layer in f32, and for one matrix the metric, its factor and the drift.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from localq.errors import bad_file
from localq.formats import bcq
from localq.models.decoder import Block
from localq.quantize.binary import matrix as binary_matrix
from localq.quantize.model import calibration_stream
from localq.quantize.model.calibration_stream import Streams
from localq.quantize.model.matrix_groups import Group, groups_of
from localq.quantize.model.sensitivity import group_linears
from localq.quantize.model.source import SourceModel
from localq.quantize.model.statistics import Statistics

CORRECTION = 0.03  # damping of the targets, as a fraction of the metric's mean diagonal
MakerOf = Callable[[str], bcq.Maker]  # planes and group of the Linear with that prefix
Written = Callable[[str], bcq.Packed | None]  # its codes from an interrupted run, if there are any


class LayerCodes:
    """Codes of an unrotated model's matrices, computed on request, each layer once."""

    def __init__(self, model: SourceModel, streams: Streams, maker_of: MakerOf, written: Written) -> None:
        """Take `streams`, the text as the input of the first layer; they are consumed."""
        self._model, self._streams, self._maker_of, self._written = model, streams, maker_of, written
        self._next = 0
        self._made: dict[str, bcq.Packed] = {}
        self._layer_of: dict[str, int] = {}
        for index in range(model.layers):
            block = model.meta_block(index)
            names = [name for group in groups_of(block) if is_supported(block, group) for name in group.names]
            self._layer_of |= {model.root(index) + name: index for name in names}

    def __contains__(self, prefix: str) -> bool:
        """True for a Linear of a layer that the format can store."""
        return prefix in self._layer_of

    def codes(self, prefix: str) -> bcq.Packed:
        """Return the codes of the Linear `prefix`, on the CPU; requests come in the order of the layers.

        Raises LocalqError (exit 8) for weights that lead to non-finite values.
        """
        layer = self._layer_of[prefix]
        with torch.inference_mode():
            while self._next <= layer:
                self._made = _take_through(self._model, self._next, self._streams, self._maker_of, self._written)
                self._next += 1
        return self._made[prefix]


def is_supported(block: Block, group: Group) -> bool:
    """True where the format can store the matrices of `group`; others, with rows no multiple of 8 long, are copied."""
    return group_linears(block, group)[0].in_features % bcq.BLOCK == 0


def _take_through(
    model: SourceModel, index: int, streams: Streams, maker_of: MakerOf, written: Written
) -> dict[str, bcq.Packed]:
    """Run both streams through layer `index`, and return its codes by prefix."""
    block, root = model.block(index), model.root(index)
    made, found = copy.deepcopy(block), dict[str, bcq.Packed]()
    groups = groups_of(block)
    names = [name for group in groups if is_supported(block, group) for name in group.names]
    before = {root + name: written(root + name) for name in names}
    known = {prefix: packed for prefix, packed in before.items() if packed is not None}

    def quantize(group: Group) -> None:
        if not is_supported(block, group):
            return
        if known.keys() == before.keys():
            packed = [known[root + name] for name in group.names]
        else:
            packed = _quantize_group(group, block, made, streams, root, maker_of)
        for name, linear, each in zip(group.names, group_linears(made, group), packed, strict=True):
            linear.weight.data = bcq.dequantize(each.to(streams.device), torch.float32)
            found[root + name] = each

    for group in groups[:2]:
        quantize(group)
    step = streams.step
    streams.advance(
        lambda x: calibration_stream.after_attention(made, x, step),
        lambda x: calibration_stream.after_attention(block, x, step),
    )
    for group in groups[2:]:
        quantize(group)
    streams.advance(lambda x: calibration_stream.after_mlp(made, x), lambda x: calibration_stream.after_mlp(block, x))
    return found


def _quantize_group(
    group: Group, block: Block, made: Block, streams: Streams, root: str, maker_of: MakerOf
) -> list[bcq.Packed]:
    """Quantize the matrices of a group, which read one input; on the CPU."""
    linears = group_linears(block, group)
    weight = torch.cat([linear.weight for linear in linears])
    statistics = _group_statistics(group, linears[0], block, made, streams)
    metric = statistics.finish(weight, CORRECTION)
    if not bool(torch.isfinite(weight).all()):
        why = "the model produces non-finite values on the calibration text"
        raise bad_file(root + group.names[0], why, "Check the weights with `localq verify`.")
    rows = [linear.out_features for linear in linears]
    parts = torch.split(weight, rows)
    makers = [maker_of(root + name) for name in group.names]
    if len(set(makers)) == 1:
        whole = binary_matrix.encode(weight, metric, makers[0]).packed.to("cpu")
        firsts = [sum(rows[:number]) for number in range(len(rows))]
        return [_own(whole.rows(first, count)) for first, count in zip(firsts, rows, strict=True)]
    return [
        binary_matrix.encode(part, metric, maker).packed.to("cpu") for part, maker in zip(parts, makers, strict=True)
    ]


def _own(rows: bcq.Packed) -> bcq.Packed:
    return bcq.Packed(rows.codes.clone(), rows.scales.clone())


def _group_statistics(group: Group, first: nn.Linear, block: Block, made: Block, streams: Streams) -> Statistics:
    """Return the input statistics of a group."""
    step = streams.step
    statistics = Statistics(first.in_features, first.out_features if group.writes else 0, streams.device)
    for x, full in streams.pairs():
        owed: Tensor | None = full - x if group.writes else None
        statistics.add(group.x(made, x, step), group.x(block, full, step), owed)
    return statistics
