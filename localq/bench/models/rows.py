"""From what was measured to the rows of the report: bytes, share of the roof, memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from localq.bench.models import bytes as model_bytes
from localq.bench.models.measure import Measurement
from localq.bench.models.plan import BenchTest
from localq.bench.models.report import BenchRow
from localq.engine.load.device import device_name
from localq.engine.load.load import LoadedModel
from localq.engine.load.vram import process_bytes
from localq.planner import footprint
from localq.planner.speed import cards, predict
from localq.planner.speed.predict import Machine

_SAME = 0.05  # share by which sizes of one variant differ


def rows_of(
    engine: str,
    format: str,
    measured: Sequence[Measurement],
    roof: float,
    model: LoadedModel | None = None,
) -> list[BenchRow]:
    """One row per case. `model`: what it ran on, where its bytes are counted and its memory is its own; read now."""
    peak = process = None
    if model is not None and model.device.type == "cuda":
        peak, process = torch.cuda.max_memory_allocated(model.device), process_bytes(model.device)
    rows = []
    for each in measured:
        decode, rate = each.case.generate > 0, 1 / each.seconds_per_token
        moved = (
            model_bytes.per_token(model, model_bytes.mean_length(each.case)) if decode and model is not None else None
        )
        rows.append(
            BenchRow(
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
                predicted_tok_per_s=predict_speed(model, each.case, roof) if decode and model is not None else None,
                extrapolated=each.extrapolated,
                held_down=each.held_down,
            )
        )
    return rows


def predict_speed(model: LoadedModel, case: BenchTest, roof: float) -> float | None:
    """tok/s as `localq fit` has it with the bandwidth `roof`; None on the CPU, and where it has none.

    The variant of a format is not known here: where the blocks have another size than the usual one has, there is none.
    """
    arch, plan = model.plan.arch, model.plan
    if model.device.type != "cuda" or arch is None or model.format not in ("nf4", "vq2", "bf16", "fp16", "gguf"):
        return None
    usual = footprint.weights_bytes(arch, model.format)["weights"]
    if abs(plan.ledger.components["weights"] - usual) > _SAME * usual:
        return None
    machine = Machine.of(cards.match_card(device_name(model.device)), roof)
    return predict.tokens_per_s(arch, model.format, "", plan.placement, machine, model_bytes.mean_length(case))
