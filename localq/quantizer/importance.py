"""How much each column of a matrix counts: the mean square of its input on a text, as the full model has it.

The diagonal of the metric that `statistics.py` has whole: an error e of one weight costs e^2 of that, other errors
apart. Matrices that read one input share it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.quantizer.layer import groups_of
from localq.quantizer.sensitivity import inputs_of, linears_of
from localq.quantizer.source import Source
from localq.quantizer.stream import Streams


def importances(model: Source, streams: Streams, on_layer: Callable[[], None]) -> dict[str, Tensor]:
    """Of every Linear of the blocks, by its prefix in the checkpoint, f32 [in] on the CPU.

    model: not turned. streams: the text as the first layer reads it; `full` is used up.
    """
    found: dict[str, Tensor] = {}
    for index in range(model.layers):
        block = model.block(index)
        groups = groups_of(block)
        readers = [linears_of(block, group)[0] for group in groups]
        sums = [torch.zeros(each.in_features, dtype=torch.float64, device=streams.device) for each in readers]
        tokens = 0
        with inputs_of(readers) as read:
            for number, x in enumerate(streams.full):
                out = block(x.to(streams.device, torch.float32).clone(), streams.step)
                streams.full[number].copy_(out)
                tokens += len(out)
                for total, linear in zip(sums, readers, strict=True):
                    total += read[linear].double().square().sum(0)
        for group, total in zip(groups, sums, strict=True):
            mean = (total / tokens).float().cpu()
            if not bool(torch.isfinite(mean).all()):
                why = "on the calibration text the model computes values that are not finite"
                raise bad_file(f"layer {index}, {group.names[0]}", why, "Fetch the model again.")
            found |= {model.root(index) + name: mean for name in group.names}
        on_layer()
    return found
