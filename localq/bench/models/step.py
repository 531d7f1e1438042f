"""`localq bench --profile`: the time of one decode step, operation by operation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TextIO

from localq.bench.conditions.conditions import conditions
from localq.bench.kernels.roofline import read_bytes_per_s
from localq.bench.models.model_bench import BenchRequest, OnState, form_of
from localq.bench.models.profile import print_profile
from localq.engine.generate import Engine
from localq.engine.load import device as devices
from localq.engine.load.load import free_memory, load
from localq.errors import ExitCode, LocalqError
from localq.sanitize import write_json


def run(request: BenchRequest, out: TextIO, on_state: OnState) -> dict[str, Any]:
    """Load, profile one step after the first depth of the plan, print, and end with one JSON line.

    Raises LocalqError as `load` does, and exit 7 where no fused step runs (no GPU).
    """
    device = devices.pick(request.options.device).device
    if device.type != "cuda":
        why = "profiling requires GPU kernels, which do not run on the CPU"
        raise LocalqError("bench --profile", why, "Use a machine with an NVIDIA GPU.", ExitCode.NO_DEVICE)
    on_state("measuring the read bandwidth")
    roof = read_bytes_per_s(device)
    free_memory()
    on_state(f"loading {request.files.name}")
    options = replace(request.options, ctx=request.ctx)
    model = load(request.files, options, opened=lambda files: request.opened(files, device))
    on_state("timing the operations of a decode step")
    profile = Engine(model).profile_step(position=request.plan.headline.start)
    result = {
        "schema": 1,
        "model": request.files.name,
        **form_of(model),
        **profile.to_dict(),
        "roof_bytes_per_s": round(roof),
        "conditions": conditions(device, request.plan.seed),
    }
    print_profile(profile, roof, out)
    write_json(out, result)
    return result
