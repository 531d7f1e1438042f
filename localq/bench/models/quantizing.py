"""`localq bench --quantize MODEL`: the cost of `localq quantize MODEL --format vq2`, measured on one layer.

The layer has the catalogued shape and random weights, the text is noise, and everything else is a real conversion: the
layer is read, rotated, and quantized with all windows. Multiply by the number of layers; download, embedding, head and
writing (a few hundred MB per layer) come on top. Some steps of fine-tuning are timed, and all of them counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TextIO

import torch

from localq.bench.conditions.conditions import conditions
from localq.bench.synthetic import checkpoint as synthetic_checkpoint
from localq.engine.load import device as devices
from localq.engine.load import vram
from localq.files import catalog
from localq.models import architecture
from localq.quantize import memory
from localq.quantize.codebooks.initial_codebooks import load_initial
from localq.quantize.codebooks.layer import quantize_layer
from localq.quantize.model.calibration_stream import Streams, stream_dtype
from localq.quantize.model.source import SourceModel
from localq.quantize.settings import ConversionSettings, Effort, Tuning, rotate_mode
from localq.sanitize import print_lines, write_json

TIMED_STEPS = 10  # of fine-tuning
ALL_WINDOWS = 113  # of 2048 tokens, in the packaged text
SCHEME = "s4l16"
GIB = 2**30


@dataclass(frozen=True)
class Method:
    """A way to quantize: effort, fine-tuning, and the number of windows of `tokens`."""

    effort: Effort
    tuning: Tuning
    windows: int
    tokens: int


@dataclass(frozen=True)
class QuantizingRequest:
    """A run of `bench --quantize`: model, device ("auto", "cpu", "cuda") and memory limit."""

    model: str
    device: str
    vram_bytes: int | None
    seed: int


class Stopwatch:
    """Seconds and peak device bytes, by stage."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}
        self._device, self._stage, self._begun = device, "", 0.0

    def __call__(self, stage: str) -> None:
        """Start `stage`; "" ends the last one."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self.peaks[self._stage] = max(self.peaks.get(self._stage, 0), peak)
        now = time.perf_counter()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._begun
        self._stage, self._begun = stage, now
        self.seconds.pop("", None)
        self.peaks.pop("", None)


def run(out: TextIO, asked: QuantizingRequest, ways: Mapping[str, Method]) -> dict[str, Any]:
    """Measure all `ways`, report to `out`, and return the object of its last line.

    Raises LocalqError: exit 4 for an unknown model, 2 for an unsuitable one, 3 where a layer does not fit, 7 without
    kernels.
    """
    device = devices.pick(asked.device).device
    layers = catalog.find(asked.model).arch.layers
    found = {}
    for name, way in ways.items():  # reported one by one: each takes minutes
        found[name] = _measure(asked, way, device, layers)
        _tell(out, f"{asked.model}, {name}", found[name])
    result = {
        "schema": 1,
        **conditions(device, asked.seed),
        "model": asked.model,
        "layers": layers,
        "scheme": SCHEME,
        "ways": found,
    }
    write_json(out, result)
    return result


def _measure(asked: QuantizingRequest, way: Method, device: torch.device, layers: int) -> dict[str, Any]:
    files, format = synthetic_checkpoint.files_of(f"{asked.model}@bf16")
    files = replace(files, config=synthetic_checkpoint.with_layers(files.config, 1))
    checkpoint = synthetic_checkpoint.checkpoint(files, format, device, asked.seed)
    steps = min(way.tuning.steps, TIMED_STEPS)
    watch = Stopwatch(device)
    with torch.no_grad():
        source = SourceModel(files, checkpoint, architecture(files.config), device, asked.seed)
        rotate = rotate_mode(source.rotated)
        books = (load_initial(SCHEME, device),) * 4
        tuning = replace(way.tuning, steps=steps)
        settings = ConversionSettings(way.effort, books, rotate=rotate, seed=asked.seed, tuning=tuning, on_stage=watch)
        hidden = source.model.config.hidden
        counted = partial(
            memory.count, source.meta_block(0), hidden, way.tokens, device=device.type, rotated=source.rotated
        )
        if device.type == "cuda":
            held = vram.open_budget(device, asked.vram_bytes, {})
            settings = memory.place(asked.model, counted, settings, held.budget)
            held.hold(held.context)
        streams = _noise(source, way, device)
        watch("reading")
        block = source.block(0)
        quantize_layer(block, 0, streams, settings)
        watch("")
    return _facts(watch, way, counted(settings), settings.on_host, device, layers)


def _noise(source: SourceModel, way: Method, device: torch.device) -> Streams:
    """Return a text of random rows."""
    source.model.make_tables(way.tokens, device)
    hidden, generator = source.model.config.hidden, torch.Generator(device).manual_seed(0)
    dtype, shape = stream_dtype(way.windows, way.tokens, hidden), (way.tokens, hidden)
    rows = [torch.randn(shape, generator=generator, device=device).to(dtype).cpu() for _ in range(way.windows)]
    return Streams(source.model, rows, device)


def _facts(
    watch: Stopwatch, way: Method, counted: memory.MemoryCount, on_host: bool, device: torch.device, layers: int
) -> dict[str, Any]:
    seconds = dict(watch.seconds)
    if way.tuning.steps > TIMED_STEPS:
        seconds["fine-tuning"] *= way.tuning.steps / TIMED_STEPS
    layer_s = sum(seconds.values())
    cuda = device.type == "cuda"
    return {
        "windows": way.windows,
        "tokens": way.tokens,
        "beam": way.effort.beam,
        "rounds": way.effort.rounds,
        "tuning_steps": way.tuning.steps,
        "tuning_steps_timed": min(way.tuning.steps, TIMED_STEPS),
        "seconds": {stage: round(each, 3) for stage, each in seconds.items()},
        "layer_s": round(layer_s, 2),
        "hours": round(layer_s * layers / 3600, 3),
        "weights_on_host": on_host,
        "counted_bytes": counted.peak,
        "allocated_bytes": watch.peaks if cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else None,
        "process_bytes": vram.process_bytes(device),
    }


def _tell(out: TextIO, name: str, facts: Mapping[str, Any]) -> None:
    text = f"{facts['windows']} windows of {facts['tokens']} tokens, beam width {facts['beam']}"
    print_lines(out, f"{name}: {text}")
    peaks = facts["allocated_bytes"] or {}
    for stage, seconds in facts["seconds"].items():
        peak = f"{peaks[stage] / GIB:8.2f} GiB" if stage in peaks else ""
        print_lines(out, f"  {stage:<12} {seconds:9.2f} s {peak}")
    taken = max(peaks.values(), default=0)
    where = f", {taken / GIB:.2f} GiB of tensors (predicted total: {facts['counted_bytes'] / GIB:.2f})" if taken else ""
    print_lines(out, f"  {'layer':<12} {facts['layer_s']:9.2f} s, all layers {facts['hours']:.2f} h{where}\n")
