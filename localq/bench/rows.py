"""From what was measured to the rows of the report: bytes, share of the roof, memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from localq.bench import bytes as counted
from localq.bench.measure import Measured
from localq.bench.report import Row
from localq.engine.load import LoadedModel
from localq.engine.vram import process_bytes


def rows_of(
    engine: str,
    format: str,
    measured: Sequence[Measured],
    roof: float,
    model: LoadedModel | None = None,
) -> list[Row]:
    """One row per case. `model`: what it ran on, where its bytes are counted and its memory is its own; read now."""
    peak = process = None
    if model is not None and model.device.type == "cuda":
        peak, process = torch.cuda.max_memory_allocated(model.device), process_bytes(model.device)
    rows = []
    for each in measured:
        decode, rate = each.case.generate > 0, 1 / each.seconds_per_token
        moved = counted.per_token(model, counted.mean_length(each.case)) if decode and model is not None else None
        rows.append(
            Row(
                engine=engine,
                format=format,
                case=each.case,
                samples=tuple(each.rates),
                tok_per_s=rate,
                first_token_s=each.first_token_s,
                bytes_per_token=moved,
                share_of_roof=None if moved is None else moved * rate / roof,
                joules_per_token=each.joules_per_token,
                peak_vram_bytes=peak,
                process_vram_bytes=process,
                extrapolated=each.extrapolated,
                held_down=each.held_down,
            )
        )
    return rows
