"""Planes and groups of binary codes where they are worth most: which scheme each sub-layer gets, for a size in all.

The sub-layers are those of `quantizer.mixture`: q, k and v; o; gate and up; down. What one loses in a scheme is what an
error in it costs at the end of the model (`quantizer/sensitivity.py`, with feedback, as `quantizer/binary.py` has it)
times what the scheme leaves of its weights, measured on rows from all over it; what it takes is counted in bytes, with
all scales. The choice among the schemes is that of `quantizer.mixture`: the step with the most loss less a byte, again
and again, while it fits. nuQmm's search quantizes each sub-layer in each scheme and reads the text again.

A conversion keeps its choice in `mixture.FILE` while it lasts, so that one that goes on makes what it would have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from localq.errors import LocalqError
from localq.files.model_folder import ModelFiles
from localq.files.schemes import BCQ_GROUPS
from localq.formats import bcq
from localq.formats.bcq.codec import MOST_PLANES
from localq.formats.checkpoint import Checkpoint
from localq.models import ARCHITECTURES
from localq.quantize.binary.layers import is_supported
from localq.quantize.bits import mixture as bit_mixture
from localq.quantize.bits.mixture import PricedGroup, Schemes
from localq.quantize.model.calibration_stream import stream_dtype
from localq.quantize.model.input_moments import CalibrationText
from localq.quantize.model.matrix_groups import groups_of
from localq.quantize.model.sensitivity import WINDOWS, group_linears, sensitivities, spread_indices
from localq.quantize.model.source import SourceModel
from localq.quantize.output.sensitivity_log import SensitivityLog
from localq.quantize.settings import ConversionSettings, Effort
from localq.wording import OnProgress, Say

ROWS = 8  # of a matrix, on which a scheme is tried
TRIED = 3  # turns of the solver there: which scheme is better shows soon
CANDIDATES = tuple(f"q{planes}g{group}" for planes in range(1, MOST_PLANES + 1) for group in BCQ_GROUPS)
MEASURING = "measuring what bits are worth"
PLAIN = ConversionSettings(Effort(), (), rotate="none", shares=False)


@dataclass(frozen=True)
class BitBudget:
    """So many bits per weight at most, with all scales, decided on a text."""

    bits: float
    text: CalibrationText

    @property
    def facts(self) -> list[str]:
        """What tells it from another."""
        return [f"{self.bits:g}", *self.text.facts]


@dataclass(frozen=True)
class MixedFormat:
    """The format with numbers of its own for each matrix, as `convert` makes it; see `bcq.Maker`."""

    makers: dict[str, bcq.Maker]
    BLOCK: int = bcq.BLOCK

    def of_matrix(self, prefix: str) -> bcq.Maker:
        """Of the Linear `prefix`; the default's where the search did not see it."""
        return self.makers.get(prefix, bcq.of_scheme(""))

    def quantization_config(self, compute_dtype: str, skipped: list[str]) -> dict[str, Any]:
        """See `bcq.quantization_config`."""
        return bcq.quantization_config(compute_dtype, skipped)


def choose_format(
    out: Path,
    task: dict[str, Any],
    wish: BitBudget,
    source: ModelFiles,
    checkpoint: Checkpoint,
    tell: OnProgress,
    say: Say,
) -> MixedFormat:
    """What the conversion `task` into `out` makes, or has made already, of each matrix.

    Raises LocalqError: exit 2 for a mixture of experts, or too few bits, 8 for damaged weights.
    """
    model_type = source.config.get("model_type")
    if model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise LocalqError(source.name, f"the architecture {model_type!r} is not supported", f"Supported: {known}.")
    architecture = ARCHITECTURES[model_type]
    with torch.no_grad():
        model = SourceModel(source, checkpoint, architecture, wish.text.device, seed=0, rotated=False)
        schemes = bit_mixture.load_or_choose(
            out, task, model.layers, lambda trail: _chosen(model, wish, trail, tell, say)
        )
    makers: dict[str, bcq.Maker] = {}
    for layer, row in enumerate(schemes):
        for group, scheme in zip(groups_of(model.meta_block(layer)), row, strict=True):
            makers |= {model.root(layer) + name: bcq.of_scheme(scheme) for name in group.names}
    return MixedFormat(makers)


def _chosen(model: SourceModel, wish: BitBudget, trail: SensitivityLog, tell: OnProgress, say: Say) -> Schemes:
    steps = 3 * model.layers
    windows = [wish.text.windows[index] for index in spread_indices(len(wish.text.windows), WINDOWS)]

    def rows() -> list[Tensor]:
        dtype = stream_dtype(len(windows), len(windows[0]), model.model.config.hidden)
        return [(each * model.model.embed_scale).to(dtype) for each in model.embedded(windows)]

    def before(left: Sequence[int]) -> None:
        tell(MEASURING, 2 * model.layers - sum(0 < number <= model.layers for number in left), steps)

    prices = sensitivities(model, rows, wish.text.device, PLAIN, trail, before)
    offered: dict[tuple[int, int], tuple[PricedGroup, list[str]]] = {}  # by layer and group
    for layer, row in enumerate(prices):
        block = model.block(layer)
        for number, (group, price) in enumerate(zip(groups_of(block), row, strict=True)):
            if is_supported(block, group):
                offered[layer, number] = _part(group.names, group_linears(block, group), price)
        tell(MEASURING, 2 * model.layers + layer + 1, steps)
    parts = [part for part, _ in offered.values()]
    chosen = bit_mixture.choose(parts, wish.bits)
    say(bit_mixture.summary(parts, chosen, wish.bits))
    schemes = [[""] * len(row) for row in prices]  # "" where the format cannot take the matrices, which are copied
    for ((layer, number), (_, names)), each in zip(offered.items(), chosen, strict=True):
        schemes[layer][number] = names[each]
    return schemes


def _part(names: tuple[str, ...], linears: list[nn.Linear], price: float) -> tuple[PricedGroup, list[str]]:
    """A sub-layer, and the schemes that its numbers count: those that no other beats in size and in loss."""
    sampled = torch.cat([linear.weight[_spread_rows(linear.out_features)].float() for linear in linears])
    energy = float(sampled.double().square().sum()) or 1.0
    tried = []
    columns = linears[0].in_features
    for scheme in CANDIDATES:
        maker = bcq.of_scheme(scheme)
        if maker.group // 2 >= max(columns, BCQ_GROUPS[0]):  # all of a row, as in half of it
            continue
        size = sum(bcq.bytes(each.out_features, each.in_features, maker.planes, maker.group) for each in linears)
        left = _error(maker, sampled) / energy
        tried.append((size, left, scheme))
    kept: list[tuple[int, float, str]] = []
    for size, left, scheme in sorted(tried):
        if not kept or (left < kept[-1][1] and size > kept[-1][0]):
            kept.append((size, left, scheme))
    sizes, lefts, schemes = zip(*kept, strict=True)
    return PricedGroup(names, price, sizes, sum(each.weight.numel() for each in linears), lefts), list(schemes)


def _spread_rows(count: int) -> Tensor:
    return torch.tensor(spread_indices(count, ROWS))


def _error(maker: bcq.Maker, rows: Tensor) -> float:
    made = bcq.quantize(rows, maker.planes, maker.group, maker.zero_point, TRIED)
    return float((bcq.dequantize(made, torch.float32) - rows).double().square().sum())
