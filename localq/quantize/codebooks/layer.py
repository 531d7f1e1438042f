"""One layer: its matrices quantized group by group, each on the input that the groups before it leave.

Four groups in computing order: q, k and v; o; gate and up; down. Matrices of a group read the same input and share
codebooks. In a mixture every expert has its own last two groups (`model/expert_tokens.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.formats.codebooks import rotation
from localq.formats.codebooks.vq2 import Packed, dequantize
from localq.models.decoder import Block
from localq.quantize.codebooks.encode import encode
from localq.quantize.codebooks.finetune import TuningText, tune
from localq.quantize.model import calibration_stream, expert_tokens
from localq.quantize.model.calibration_stream import Streams
from localq.quantize.model.fold import plain_linear
from localq.quantize.model.linear_algebra import pieces
from localq.quantize.model.matrix_groups import DOWN, Group, groups_of
from localq.quantize.model.offload import on_device
from localq.quantize.model.statistics import Statistics, rotate_metric_
from localq.quantize.settings import ConversionSettings, QuantizedLayer

OnGroup = Callable[[int], None]  # weights of the group


def quantize_layer(
    block: Block, index: int, streams: Streams, settings: ConversionSettings, on_group: OnGroup = lambda weights: None
) -> QuantizedLayer:
    """Quantize a dense `block`, f32 on the device of `streams`, and run both streams through it.

    A mixture has unstacked experts. On return `block` holds the same values, on the host with
    `ConversionSettings.on_host`; the streams are after the layer. `on_group` is called after every group.
    """
    block.to("cpu" if settings.on_host else streams.device)
    made, found = copy.deepcopy(block), QuantizedLayer()
    before = [each.clone() for each in streams.x] if settings.tuning.steps else []
    groups = groups_of(block)
    for group in groups[:2]:
        on_group(_quantize(group, block, made, index, streams, settings, found))
    settings.on_stage("forward")
    _through_attention(block, made, streams)
    last = 0
    chosen = _choices(made, streams)
    for group in groups[2:]:
        on_group(last)
        last = _quantize(group, block, made, index, streams, settings, found, chosen)
    settings.on_stage("forward")
    _through_mlp(block, made, streams)
    if before:
        _tune(made, index, before, streams, settings, found)
    on_group(last)
    return found


def _choices(made: Block, streams: Streams) -> list[Tensor]:
    if expert_tokens.mixture_of(made) is None:
        return []
    with on_device(made, (), streams.device):
        return expert_tokens.choices(made, streams)


def _through_attention(block: Block, made: Block, streams: Streams) -> None:
    names, step = [name for group in groups_of(block)[:2] for name in group.names], streams.step
    with on_device(made, names, streams.device), on_device(block, names, streams.device):
        streams.advance(
            lambda x: calibration_stream.after_attention(made, x, step),
            lambda full: calibration_stream.after_attention(block, full, step),
        )


def _through_mlp(block: Block, made: Block, streams: Streams) -> None:
    names = [name for group in groups_of(block)[2:] for name in group.names]
    with on_device(made, names, streams.device), on_device(block, names, streams.device):
        streams.advance(
            lambda x: calibration_stream.after_mlp(made, x), lambda full: calibration_stream.after_mlp(block, full)
        )


def _tune(
    made: Block, index: int, before: list[Tensor], streams: Streams, settings: ConversionSettings, found: QuantizedLayer
) -> None:
    """Fine-tune `made` on the inputs `before`; its new output replaces the quantized stream."""
    device, step = streams.device, streams.step

    def sequence(number: int) -> tuple[Tensor, Tensor]:
        return before[number].to(device).float(), streams.full[number].to(device).float()

    seed = settings.seed * 4096 + index
    text = TuningText(len(before), sequence, step)
    packed, others, _ = tune(made, found.packed, text, settings.tuning, seed, device, settings.on_stage)
    found.packed.update(packed)
    found.others.update({name: value.to(settings.dtype).cpu() for name, value in others.items()})
    for name, matrix in packed.items():
        set_weights(made, name, matrix, device)
    _put_others(made, found.others)
    with on_device(made, list(packed), device):
        for kept, x in zip(streams.x, before, strict=True):  # rounded where `pass_layer` rounds
            kept.copy_(calibration_stream.after_attention(made, x.to(device, torch.float32), step))
            kept.copy_(calibration_stream.after_mlp(made, kept.to(device, torch.float32)))


def _put_others(block: Block, others: dict[str, Tensor]) -> None:
    for name, value in others.items():
        parameter = block.get_parameter(name)
        parameter.data = value.to(parameter.device, parameter.dtype)


def pass_layer(
    block: Block, packed: dict[str, Packed], others: dict[str, Tensor], streams: Streams, settings: ConversionSettings
) -> None:
    """Run both streams through a finished layer; block: as in `quantize_layer`, others: of `QuantizedLayer`."""
    block.to("cpu" if settings.on_host else streams.device)
    made = copy.deepcopy(block)
    for name, matrix in packed.items():
        set_weights(made, name, matrix, streams.device)
    _put_others(made, others)
    _through_attention(block, made, streams)
    _through_mlp(block, made, streams)


def pass_full(block: Block, streams: Streams, settings: ConversionSettings) -> None:
    """Run the full stream alone through a layer."""
    block.to("cpu" if settings.on_host else streams.device)
    names, step = [[name for group in some for name in group.names] for some in _halves(block)], streams.step
    with on_device(block, names[0], streams.device):
        streams.advance(None, lambda full: calibration_stream.after_attention(block, full, step))
    with on_device(block, names[1], streams.device):
        streams.advance(None, lambda full: calibration_stream.after_mlp(block, full))


def _halves(block: Block) -> tuple[list[Group], list[Group]]:
    """Return the groups of attention, and those of the MLP."""
    groups = groups_of(block)
    return groups[:2], groups[2:]


def set_weights(block: Block, name: str, packed: Packed, device: torch.device) -> None:
    """Set the linear `name` of a dense block to the weights of `packed`, dequantized on `device`."""
    linear = plain_linear(block.get_submodule(name))
    linear.weight.data = dequantize(packed.to(device), linear.weight.dtype).to(linear.weight.device)


def _quantize(
    group: Group,
    block: Block,
    made: Block,
    index: int,
    streams: Streams,
    settings: ConversionSettings,
    found: QuantizedLayer,
    chosen: list[Tensor] | None = None,
) -> int:
    """Quantize a group into `made` and `found`; returns its number of weights. chosen: the experts of every token."""
    linears = [plain_linear(block.get_submodule(name)) for name in group.names]
    columns, rows = linears[0].in_features, [linear.out_features for linear in linears]
    settings.on_stage("statistics")
    device, statistics = streams.device, _gather(group, block, made, streams, chosen or [])
    settings.on_stage("targets")
    weight = torch.empty(sum(rows), columns, device=device)
    for part, linear in zip(torch.split(weight, rows), linears, strict=True):
        part.copy_(linear.weight.data)
    metric = statistics.finish(weight, settings.correction)
    if not all(bool(torch.isfinite(weight[some]).all()) for some in pieces(*weight.shape)):
        why = "the model produces non-finite values on the calibration text"
        raise bad_file(f"layer {index}, {group.names[0]}", why, "Check the weights with `localq verify`.")
    signs = group.signs(columns, index, settings)
    if signs is not None:
        _rotate_(weight, metric, signs.to(device))
    found.homes.update(group.homes(settings.shares))
    whole = [(group.names, rows, weight)]
    alone = [((name,), [len(part)], part) for name, part in zip(group.names, torch.split(weight, rows), strict=True)]
    for names, counts, part in whole if settings.shares else alone:
        encoded = encode(part, metric, settings.codebooks[group.number], settings.effort, settings.on_stage)
        for name, packed in zip(names, encoded.matrices(counts, signs, columns), strict=True):
            found.packed[name] = packed
            set_weights(made, name, packed, device)
    return weight.numel()


def _gather(group: Group, block: Block, made: Block, streams: Streams, chosen: list[Tensor]) -> Statistics:
    """Return the input statistics of a group."""
    first, device, step = plain_linear(block.get_submodule(group.names[0])), streams.device, streams.step
    if group.expert is not None:
        with on_device(made, group.after, device), on_device(block, group.after, device):
            down = group.number == DOWN
            return expert_tokens.gather(block, made, group.expert, down, chosen, streams, first.in_features)
    statistics = Statistics(first.in_features, first.out_features if group.writes else 0, device)
    with on_device(made, group.after, device), on_device(block, group.after, device):
        for x, full in streams.pairs():
            owed = full - x if group.writes else None
            statistics.add(group.x(made, x, step), group.x(block, full, step), owed)
    return statistics


def _rotate_(weight: Tensor, metric: Tensor, signs: Tensor) -> None:
    """Rotate both in place, to match a rotated input."""
    for rows in pieces(*weight.shape):
        weight[rows] = rotation.rotate(weight[rows], signs)
    rotate_metric_(metric, signs)
