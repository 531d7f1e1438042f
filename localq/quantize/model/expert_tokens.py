"""Mixtures of experts in the quantizer: the tokens that each expert is quantized on.

An expert is quantized on the tokens that the router of the quantized model sends it. Some experts get few tokens or
none, too few for the rank of their inputs' moments. They borrow tokens of other experts, evenly from all over the text,
up to `LEAST` tokens in total. A borrowed token counts a quarter (`BORROWED` scales its row). An expert that the router
never chooses is thus quantized on the layer's input.

Experts do not compensate for the drift of the residual stream (d of `statistics.Statistics`): all experts of a token
would do so at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from localq.models.decoder import Block
from localq.models.unstacked_experts import UnstackedMixture
from localq.quantize.model import calibration_stream
from localq.quantize.model.calibration_stream import Streams
from localq.quantize.model.statistics import Statistics

LEAST = 1024  # tokens that an expert is quantized on, if the text has as many
BORROWED = 0.5


def mixture_of(block: Block) -> UnstackedMixture | None:
    """Return the mixture of a block, None without one."""
    part: nn.Module = block.mlp
    return part if isinstance(part, UnstackedMixture) else None


def choices(made: Block, streams: Streams) -> list[Tensor]:
    """Return the experts of every token, int64 [T, k] for each window, on the CPU.

    All of `made` but the experts is on the device, and the streams are after attention.
    """
    mixture = mixture_of(made)
    assert mixture is not None
    return [
        mixture.router.route(calibration_stream.mlp_input(made, x.to(streams.device).float()))[1].cpu()
        for x in streams.x
    ]


def tokens_of(chosen: list[Tensor], expert: int, least: int = LEAST) -> list[tuple[Tensor, Tensor]]:
    """Return for each window the tokens that go to `expert`, and those that it borrows."""
    goes = [(each == expert).any(1) for each in chosen]
    count, everything = sum(int(each.sum()) for each in goes), torch.cat(goes)
    others = (~everything).nonzero().flatten()
    wanted = min(max(least - count, 0), len(others))
    lent = torch.zeros_like(everything)
    if wanted:
        lent[others[torch.arange(wanted) * len(others) // wanted]] = True
    sizes = [len(each) for each in goes]
    return [(own.nonzero().flatten(), borrowed.nonzero().flatten())
            for own, borrowed in zip(goes, torch.split(lent, sizes), strict=True)]  # fmt: skip


def gather(
    block: Block, made: Block, expert: int, down: bool, chosen: list[Tensor], streams: Streams, columns: int
) -> Statistics:
    """Return the input statistics of an expert's gate and up, or of its down projection."""
    statistics = Statistics(columns, 0, streams.device)
    for x, full, factor in _rows(chosen, expert, streams):
        inputs = [_input(one, expert, down, rows) * factor for one, rows in ((made, x), (block, full))]
        statistics.add(*inputs)
    return statistics


def _rows(chosen: list[Tensor], expert: int, streams: Streams) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield both streams at the tokens of an expert, f32 on the device, and the factor of each row."""
    tokens = tokens_of(chosen, expert)
    for (own, borrowed), x, full in zip(tokens, streams.x, streams.full, strict=True):
        rows = torch.cat((own, borrowed))
        if len(rows):
            factor = torch.ones(len(rows), 1, device=streams.device)
            factor[len(own) :] = BORROWED
            yield x[rows].to(streams.device).float(), full[rows].to(streams.device).float(), factor


def _input(block: Block, expert: int, down: bool, x: Tensor) -> Tensor:
    mixture, normed = mixture_of(block), calibration_stream.mlp_input(block, x)
    assert mixture is not None
    if not down:
        return normed
    one = mixture.expert(expert)
    gated: Tensor = one.activation(one.gate_proj(normed)) * one.up_proj(normed)
    return gated
