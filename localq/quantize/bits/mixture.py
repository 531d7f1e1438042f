"""Mixed schemes of vq2: each group of matrices gets the scheme that is worth its bytes, within a total size.

Matrices of a group (`matrix_groups.groups_of`) read one input and share codebooks, and so their scheme. The loss of a
scheme is the group's sensitivity (`model/sensitivity.py`) times the noise that the scheme leaves; its cost is counted
in bytes, with codebooks, scales and signs. From 2 bits everywhere, the step with the largest loss reduction per byte is
taken again and again while it fits: along the lower hull of each group's steps, which minimizes the sum for that size.

Measured on smollm2-135m, quantized fast (3,072 tokens, 2 paths) to 2.67 bits in total: perplexity 60.7 with 2.5 bits of
codes everywhere, 51.8 mixed (4 windows of 1024 of the validation slice).

A conversion keeps its choice in `FILE` while it runs, and until then its measurements (`output/sensitivity_log.py`), so
that a resumed one gives the same result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq.errors import usage_error
from localq.files.json_files import read_object
from localq.formats.checkpoint import TensorInfo
from localq.quantize.model.fold import plain_linear
from localq.quantize.model.matrix_groups import groups_of
from localq.quantize.model.source import SourceModel
from localq.quantize.output.sensitivity_log import SensitivityLog
from localq.quantize.output.shards import write_file
from localq.wording import Say

# Mean square error on Gaussian weights by scheme, with 16 paths (tests/quantize/bits/test_mixture.py).
NOISE_LEFT = {"s4l16": 0.0824, "s4l16+s16l16": 0.0508, "s4l16+s8l16": 0.0282, "s4l16+s4l16": 0.00792}
SCHEMES = tuple(NOISE_LEFT)
FILE = "conversion.bits.json"
MAX_FILE_BYTES = 2**20
MOST_BITS = 4  # the largest `--bits`
_DENSE = ("weight", "bias")
Schemes = list[list[str]]  # by layer and group
Layout = Callable[[int, list[str]], dict[str, TensorInfo]]  # (layer, schemes of its groups) -> its tensors


@dataclass(frozen=True)
class PricedGroup:
    """A group of a layer, with what each scheme costs and loses.

    sensitivity  nats per token
    sizes        bytes in each of `SCHEMES`, or of the schemes of another format, ascending
    weights      number of weights
    left         mean square error that each scheme leaves of unit noise
    """

    names: tuple[str, ...]
    sensitivity: float
    sizes: tuple[int, ...]
    weights: int
    left: tuple[float, ...] = tuple(NOISE_LEFT.values())

    def loss(self, scheme: int) -> float:
        """Return the loss in nats per token."""
        return self.sensitivity * self.left[scheme]

    def steps(self) -> list[int]:
        """Return the schemes on the lower hull of loss over size, ascending; the first is 0."""
        hull: list[int] = []
        for scheme in range(len(self.sizes)):
            while len(hull) > 1 and self.slope(hull[-1], scheme) >= self.slope(hull[-2], hull[-1]):
                hull.pop()
            hull.append(scheme)
        return hull

    def slope(self, before: int, after: int) -> float:
        """Return the loss reduction per byte, in nats."""
        return (self.loss(before) - self.loss(after)) / (self.sizes[after] - self.sizes[before])


def choose(parts: Sequence[PricedGroup], bits: float) -> list[int]:
    """Choose a scheme for each part (its index in `SCHEMES`), at most `bits` per weight over all of them.

    Raises LocalqError (exit 2) where even the smallest schemes take more.
    """
    size, budget = _least(parts, bits)
    waiting = [part.steps()[1:] for part in parts]
    chosen = [0] * len(parts)
    while True:
        found = [
            (-parts[index].slope(chosen[index], steps[0]), index)
            for index, steps in enumerate(waiting)
            if steps and size + _more(parts[index], chosen[index], steps[0]) <= budget
        ]
        if not found:
            return chosen
        index = min(found)[1]
        size += _more(parts[index], chosen[index], waiting[index][0])
        chosen[index] = waiting[index].pop(0)


def _least(parts: Sequence[PricedGroup], bits: float) -> tuple[int, int]:
    """Return the bytes of all parts in the smallest scheme, and the budget; raises as `choose`."""
    weights, size = sum(part.weights for part in parts), sum(part.sizes[0] for part in parts)
    budget = int(bits * weights / 8)
    if size > budget:
        least = -(-800 * size // weights) / 100
        why = f"this model needs at least {least:.2f} bits per weight, including codebooks, scales and signs"
        step = "Mixed bit widths require a larger model; --bits 2 works for any model."
        raise usage_error("--bits", why, f"Use {least:.2f} or more." if least < MOST_BITS else step)
    return size, budget


def _more(part: PricedGroup, before: int, after: int) -> int:
    return part.sizes[after] - part.sizes[before]


def summary(parts: Sequence[PricedGroup], chosen: Sequence[int], bits: float) -> str:
    """Return a line for the user: bits per weight in total, and by kind of group."""
    kinds: dict[str, list[int]] = {}
    for part, scheme in zip(parts, chosen, strict=True):
        name = " ".join(name.rpartition(".")[2].removesuffix("_proj") for name in part.names)
        kind = kinds.setdefault(name, [0, 0])
        kind[0] += part.sizes[scheme]
        kind[1] += part.weights
    size, weights = (sum(each) for each in zip(*kinds.values(), strict=True))
    each = ", ".join(f"{name} {8 * held / count:.2f}" for name, (held, count) in kinds.items())
    return f"{8 * size / weights:.3f} bits per weight (at most {bits:g}): {each}"


def load_or_choose(
    folder: Path, job: dict[str, Any], layers: int, make: Callable[[SensitivityLog], Schemes]
) -> Schemes:
    """Load the choice of an interrupted conversion `job` in `folder`, or make it; `make` resumes a killed measuring."""
    path, log = folder / FILE, SensitivityLog(folder, job)
    found = read_object(path, MAX_FILE_BYTES) if path.is_file() else {}
    schemes = found.get("schemes") if found.get("job") == job else None
    if not isinstance(schemes, list) or len(schemes) != layers:
        schemes = make(log)
        write_file(path, json.dumps({"job": job, "schemes": schemes}, indent=1).encode())
    log.clear()
    return schemes


def choose_schemes(
    model: SourceModel, prices: Sequence[Sequence[float]], shares: bool, layout: Layout, bits: float, say: Say
) -> Schemes:
    """Choose schemes for at most `bits` per weight; prices: from `sensitivity.sensitivities`."""
    parts = _parts(model, prices, shares, layout)
    best = choose(parts, bits)
    say(summary(parts, best, bits))
    schemes, count = [SCHEMES[each] for each in best], len(prices[0])
    return [schemes[first : first + count] for first in range(0, len(schemes), count)]


def check_budget(model: SourceModel, shares: bool, layout: Layout, bits: float | None) -> None:
    """Raise LocalqError (exit 2) where `bits` are too few, before anything is written or measured; None = no mixing."""
    if bits is None:
        return
    rows = [[0.0] * len(groups_of(model.meta_block(layer))) for layer in range(model.layers)]
    _least(_parts(model, rows, shares, layout), bits)


def _parts(model: SourceModel, rows: Sequence[Sequence[float]], shares: bool, layout: Layout) -> list[PricedGroup]:
    """Return the groups of all layers; rows: their sensitivities; shares: as in `ConversionSettings`."""
    parts: list[PricedGroup] = []
    for layer, row in enumerate(rows):
        planned = [layout(layer, [scheme] * len(row)) for scheme in SCHEMES]
        block, root = model.meta_block(layer), model.root(layer)
        for group, sensitivity in zip(groups_of(block), row, strict=True):
            modules = {root + name for name in (*group.names, *group.homes(shares).values())}
            sizes = tuple(_bytes_of(tensors, modules) for tensors in planned)
            weights = sum(plain_linear(block.get_submodule(name)).weight.numel() for name in group.names)
            parts.append(PricedGroup(group.names, sensitivity, sizes, weights))
    return parts


def _bytes_of(tensors: dict[str, TensorInfo], modules: set[str]) -> int:
    """Return the bytes stored for quantized modules and their codebooks."""
    parts = [key.rpartition(".") for key in tensors]
    return sum(
        tensors[f"{module}.{last}"].nbytes for module, _, last in parts if module in modules and last not in _DENSE
    )
