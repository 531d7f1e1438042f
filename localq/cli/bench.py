"""`localq bench`: how fast, against what, and against which limit. The measuring is `localq/bench/`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from localq.cli import options
from localq.cli.output import note, print_json


def bench(
    model: options.Model = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Time the CUDA kernels instead of a model.")] = False,
    generate: Annotated[int, typer.Option("--tg", "-n", min=2, help="Tokens to generate.")] = 128,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Timed runs; medians count.")] = 5,
    device: options.Device = None,
    dtype: options.Dtype = None,
    offline: options.Offline = None,
    json: options.Json = False,
) -> None:
    """Measure decode speed: MODEL against transformers (CPU) or against the eager step (GPU)."""
    settings = options.effective(model=model, device=device, dtype=dtype, offline=offline)
    out = sys.stderr if json else sys.stdout
    if kernels:
        from localq.bench.kernels import run as run_kernels  # torch loads only now

        result = run_kernels(out)
    else:
        from localq import prepare
        from localq.bench.decode import run as run_decode  # torch loads only now

        path = prepare.source_path(settings.model, note, offline=settings.offline)
        result = run_decode(path, out, settings.device, settings.dtype, generate, repetitions)
    if json:
        print_json(result)
