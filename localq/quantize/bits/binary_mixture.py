"""Mixed binary codes: each sub-layer gets the planes and group size that are worth its bytes, within a total size.

The sub-layers are the groups of `bits/mixture.py`: q, k and v; o; gate and up; down. The loss of a scheme is the
sub-layer's sensitivity (`model/sensitivity.py`, with feedback, as in `binary/matrix.py`) times the error that the
scheme leaves, measured on rows from all over the sub-layer; its cost is counted in bytes, with all scales. The choice
among the schemes is that of `bits/mixture.py`. nuQmm's search quantizes each sub-layer in each scheme and reads the
text again.

A conversion keeps its choice in `mixture.FILE` while it runs, so that a resumed one gives the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from localq.files.model_folder import ModelFiles
from localq.files.schemes import BCQ_GROUPS
from localq.formats import bcq
from localq.formats.bcq.codec import MOST_PLANES
from localq.formats.checkpoint import Checkpoint
from localq.models import architecture
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

ROWS = 8  # of a matrix, to try a scheme on
TRIED = 3  # iterations of the solver there: enough to rank the schemes
CANDIDATES = tuple(f"q{planes}g{group}" for planes in range(1, MOST_PLANES + 1) for group in BCQ_GROUPS)
MEASURING = "measuring sensitivity"
PLAIN = ConversionSettings(Effort(), (), rotate="none", shares=False)


@dataclass(frozen=True)
class BitBudget:
    """A budget of bits per weight, with all scales, and the text that decides where they go."""

    bits: float
    text: CalibrationText

    @property
    def facts(self) -> list[str]:
        """Strings that identify the budget in a conversion's fingerprint."""
        return [f"{self.bits:g}", *self.text.facts]


@dataclass(frozen=True)
class MixedFormat:
    """bcq with planes and group size per matrix; stands in for the format in `by_tensor.convert`."""

    makers: dict[str, bcq.Maker]
    BLOCK: int = bcq.BLOCK

    def of_matrix(self, prefix: str) -> bcq.Maker:
        """Return the parameters of the Linear `prefix`; the default's outside the search."""
        return self.makers.get(prefix, bcq.of_scheme(""))

    def quantization_config(self, compute_dtype: str, skipped: list[str]) -> dict[str, Any]:
        """Return that entry of config.json."""
        return bcq.quantization_config(compute_dtype, skipped)


def choose_format(
    out: Path,
    task: dict[str, Any],
    budget: BitBudget,
    source: ModelFiles,
    checkpoint: Checkpoint,
    on_progress: OnProgress,
    say: Say,
) -> MixedFormat:
    """Choose planes and group size of each matrix for the conversion `task`, or load the choice from `out`.

    Raises LocalqError: exit 2 for a mixture of experts, or too few bits, 8 for damaged weights.
    """
    family = architecture(source.config, source.name)
    with torch.no_grad():
        model = SourceModel(source, checkpoint, family, budget.text.device, seed=0, rotated=False)
        schemes = bit_mixture.load_or_choose(
            out, task, model.layers, lambda log: _choose_schemes(model, budget, log, on_progress, say)
        )
    makers: dict[str, bcq.Maker] = {}
    for layer, row in enumerate(schemes):
        for group, scheme in zip(groups_of(model.meta_block(layer)), row, strict=True):
            makers |= {model.root(layer) + name: bcq.of_scheme(scheme) for name in group.names}
    return MixedFormat(makers)


def _choose_schemes(
    model: SourceModel, budget: BitBudget, log: SensitivityLog, on_progress: OnProgress, say: Say
) -> Schemes:
    steps = 3 * model.layers
    windows = [budget.text.windows[index] for index in spread_indices(len(budget.text.windows), WINDOWS)]

    def rows() -> list[Tensor]:
        dtype = stream_dtype(len(windows), len(windows[0]), model.model.config.hidden)
        return [model.model.scale_embedding(each).to(dtype) for each in model.embeddings(windows)]

    def before(left: Sequence[int]) -> None:
        on_progress(MEASURING, 2 * model.layers - sum(0 < number <= model.layers for number in left), steps)

    prices = sensitivities(model, rows, budget.text.device, PLAIN, log, before)
    offered: dict[tuple[int, int], tuple[PricedGroup, list[str]]] = {}  # by layer and group
    for layer, row in enumerate(prices):
        block = model.block(layer)
        for number, (group, price) in enumerate(zip(groups_of(block), row, strict=True)):
            if is_supported(block, group):
                offered[layer, number] = _part(group.names, group_linears(block, group), price)
        on_progress(MEASURING, 2 * model.layers + layer + 1, steps)
    parts = [part for part, _ in offered.values()]
    chosen = bit_mixture.choose(parts, budget.bits)
    say(bit_mixture.summary(parts, chosen, budget.bits))
    schemes = [[""] * len(row) for row in prices]  # "" where the format cannot take the matrices, which are copied
    for ((layer, number), (_, names)), each in zip(offered.items(), chosen, strict=True):
        schemes[layer][number] = names[each]
    return schemes


def _part(names: tuple[str, ...], linears: list[nn.Linear], price: float) -> tuple[PricedGroup, list[str]]:
    """Return a sub-layer and its schemes: those that no other beats in both size and loss."""
    sampled = torch.cat([linear.weight[_spread_rows(linear.out_features)].float() for linear in linears])
    energy = float(sampled.double().square().sum()) or 1.0
    tried = []
    columns = linears[0].in_features
    for scheme in CANDIDATES:
        maker = bcq.of_scheme(scheme)
        if maker.group // 2 >= max(columns, BCQ_GROUPS[0]):  # the same as a smaller group: both cover the row
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
