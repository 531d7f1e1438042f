"""`localq bench MODEL`: a whole model, timed beside the same engine in 16 bit and other engines in the same run.

Correctness first: on a GPU the captured graph and the eager step must give the same tokens, and the common tokens with
other engines are counted. Then the model alone on the device; then, for quantized weights, the same weights in 16 bit
instead; other engines run on the tensors of whichever is loaded. Where 16 bit does not fit, see `extrapolate`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from localq.bench.conditions import power
from localq.bench.conditions.conditions import conditions
from localq.bench.kernels.roofline import read_bytes_per_s
from localq.bench.models import measure, rivals
from localq.bench.models.extrapolate import Timed, extrapolate
from localq.bench.models.measure import EngineSubject, Subject
from localq.bench.models.plan import RIVALS, BenchPlan, BenchTest
from localq.bench.models.report import BASELINE, OURS, BenchReport, BenchRow
from localq.bench.models.rows import rows_of
from localq.bench.synthetic.checkpoint import checkpoint, with_layers
from localq.engine.generate import Engine
from localq.engine.load import device as devices
from localq.engine.load.load import LoadedModel, free_memory, load
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files.architecture import Architecture
from localq.files.model_folder import ModelFiles
from localq.formats.checkpoint import Checkpoint
from localq.formats.dense_checkpoint import dequantized
from localq.models.experts import Experts
from localq.models.layers import RMSNorm
from localq.planner.load_options import LoadOptions

TRANSFORMERS, BITSANDBYTES = RIVALS
OnState = Callable[[str], None]  # the current state, for a progress line


@dataclass(frozen=True)
class BenchRequest:
    """A run of `bench MODEL`.

    opened     returns the weights of `files`, or random ones, on a device
    against    engines of `plan.RIVALS`
    baseline   measure quantized weights in 16 bit as well
    draft      a draft model, for `bench --drafts`
    """

    files: ModelFiles
    opened: Callable[[ModelFiles, torch.device], Checkpoint]
    options: LoadOptions
    plan: BenchPlan
    against: tuple[str, ...] = ()
    baseline: bool = True
    draft: ModelFiles | None = None

    @property
    def ctx(self) -> int:
        """The requested context length, or what the tests need, within the model's limit.

        Raises LocalqError (exit 2) where the tests need more than requested.
        """
        if self.options.ctx is None:
            most = int(self.files.text_config.get("max_position_embeddings", self.plan.ctx))
            return max(min(self.plan.ctx, most), self.plan.positions)
        if self.options.ctx < self.plan.positions:
            why = f"a context of {self.options.ctx} tokens is too short; the tests need {self.plan.positions}"
            raise usage_error("--ctx", why, "Remove --ctx.")
        return self.options.ctx


def run(request: BenchRequest, on_state: OnState) -> BenchReport:
    """Run the benchmark. Raises LocalqError as `load` does, and exit 1 where graph and eager step disagree."""
    options = replace(request.options, ctx=request.ctx)
    device = devices.pick(request.options.device).device
    on_state("measuring the read bandwidth")
    bench = _ModelBench(request, device, read_bytes_per_s(device), on_state)
    free_memory()
    model = bench.ours(options)
    facts = {**form_of(model), **conditions(device, request.plan.seed)}  # now, while the clocks are those of the timing
    predicted, dtype, plain = model.plan.ledger.components, model.dtype, is_plain(model)
    del model
    if not plain and (request.baseline or TRANSFORMERS in request.against):
        with bench.noting("16 bit"):
            bench.in_16_bit(dtype)
    return BenchReport(
        model=request.files.name,
        rows=tuple(bench.rows),
        headline=request.plan.headline,
        conditions=facts,
        roof_bytes_per_s=bench.roof,
        checked_tokens=measure.CHECK_TOKENS,
        same_tokens=bench.same_tokens,
        ledger_bytes=bench.ledger,
        predicted_bytes=predicted,
        notes=tuple(bench.notes),
        why_no_fp16=_why_no_fp16(plain, request.baseline),
    )


def _why_no_fp16(plain: bool, asked: bool) -> str:
    """Return why the headline has no speedup over fp16."""
    if not asked:
        return "no fp16 baseline (--no-baseline)"
    return "no fp16 baseline: the model is not quantized" if plain else "fp16 could not be measured (see the notes)"


def form_of(model: LoadedModel) -> dict[str, Any]:
    """Return format, dtype, context length and placement of the measured model."""
    return {
        "format": model.format,
        "dtype": name_of(model.dtype),
        "ctx": model.ctx,
        "kv_bits": model.kv_bits,
        "head": model.head_bits,
        "embed": model.embed,
    }


def is_plain(model: LoadedModel) -> bool:
    """True where no matrix is quantized; on the CPU all are dequantized at load time."""
    leaves = (module for module in model.model.modules() if next(module.children(), None) is None)
    return all(isinstance(module, nn.Linear | nn.Embedding | RMSNorm | Experts) for module in leaves)


def short_name(dtype: torch.dtype) -> str:
    """Return the dtype as a format: "fp16"."""
    return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def name_of(dtype: torch.dtype) -> str:
    """Return the dtype as on the command line: "float16"."""
    return str(dtype).removeprefix("torch.")


class _ModelBench:
    """One run: its request and its results so far."""

    def __init__(self, request: BenchRequest, device: torch.device, roof: float, on_state: OnState) -> None:
        self.request, self.device, self.roof, self._on_state = request, device, roof, on_state
        self._meter, self._limits = power.meter(device), power.throttle(device)
        self._seed = request.plan.seed
        self.rows: list[BenchRow] = []
        self.notes: list[str] = []
        self.ledger: dict[str, int] = {}
        self.same_tokens: dict[str, int] = {}

    def ours(self, options: LoadOptions) -> LoadedModel:
        """Measure localq, then the engines that can run on its loaded tensors."""
        request = self.request
        model = self._load(request.files, options, lambda files: request.opened(files, self.device))
        eager = self._eager_ids(model)
        engine = Engine(model)
        self.notes += engine.notes
        self.ledger = engine.ledger()
        ids = measure.greedy_ids(engine, self._seed)
        if eager is not None and ids != eager:
            why = "the CUDA graph and eager execution produce different tokens"
            raise LocalqError("bench", why, "Report this as a bug.")
        subject, timed = EngineSubject(engine, self._seed), Timed()
        beside = TRANSFORMERS in request.against and is_plain(model)
        if beside and self.device.type == "cpu":  # in turn, because the host's speed drifts
            with self.noting(TRANSFORMERS):
                timed |= self._time({OURS: subject, TRANSFORMERS: self._transformers(model, request.files, ids)})
        timed = timed or self._time({OURS: subject})
        rows = rows_of(OURS, model.format, timed[OURS], self.roof, model)  # before the profiler takes memory
        gap = self._host_gap(engine, request.plan.headline)
        self.rows += [replace(row, host_gap_us=gap if row.case.generate else None) for row in rows]
        if beside and self.device.type != "cpu":
            timed |= self._guard(TRANSFORMERS, lambda: self._transformers(model, request.files, ids))
        if BITSANDBYTES in request.against:
            timed |= self._guard(BITSANDBYTES, lambda: self._bitsandbytes(model, ids))
        for name, format in ((TRANSFORMERS, short_name(model.dtype)), (BITSANDBYTES, "nf4")):
            self.rows += rows_of(name, format, timed.get(name, []), self.roof)
        return model

    def in_16_bit(self, dtype: torch.dtype) -> None:
        """Measure localq and transformers on the same weights dequantized; on two cuts where they do not fit."""
        request = self.request
        free_memory()
        options = replace(  # nothing quantized or on the host, the whole card; what does not fit is cut
            request.options, ctx=request.ctx, dtype=name_of(dtype), kv_bits=16, vram_bytes=None, embed="device",
            head="16", force=False,
        )  # fmt: skip
        try:
            self._time_plain(
                request.files,
                options,
                lambda files: dequantized(request.opened(files, self.device), self.device, dtype),
                whole=True,
            )
        except LocalqError as error:
            if error.exit_code != ExitCode.DOES_NOT_FIT:
                raise
        else:
            return
        free_memory()
        layers = Architecture.from_config(request.files.config).layers
        timed, pair = extrapolate(layers, lambda count: self._time_cut(count, options, dtype))
        how = f"from runs with {pair[0]} and {pair[1]} of its {layers} layers and random weights"
        self.notes.append(f"the 16-bit model does not fit; its speed is extrapolated {how}")
        for name, measured in timed.items():
            self.rows += rows_of(name, short_name(dtype), measured, self.roof)

    # ---- parts

    def _time_cut(self, layers: int, options: LoadOptions, dtype: torch.dtype) -> Timed:
        config = {**with_layers(self.request.files.config, layers), "dtype": name_of(dtype)}
        config.pop("quantization_config", None)
        files = ModelFiles(path=Path(), kind="safetensors", config=config, name=self.request.files.name)
        return self._time_plain(files, options, lambda each: checkpoint(each, "fp16", self.device, self._seed))

    def _time_plain(
        self, files: ModelFiles, options: LoadOptions, opened: Callable[[ModelFiles], Checkpoint], whole: bool = False
    ) -> Timed:
        """Load a model, time it as `_time_on` does, and free it."""
        timed = self._time_on(self._load(files, options, opened), files, whole)
        free_memory()
        return timed

    def _time_on(self, model: LoadedModel, files: ModelFiles, whole: bool) -> Timed:
        """Time localq and transformers on plain weights; whole: not a cut, so rows are added at once."""
        engine, format, timed = Engine(model), short_name(model.dtype), Timed()
        ids = measure.greedy_ids(engine, self._seed)
        if self.request.baseline:
            timed |= self._time({BASELINE: EngineSubject(engine, self._seed)})
            if whole:
                self.rows += rows_of(BASELINE, format, timed[BASELINE], self.roof, model)
        if TRANSFORMERS in self.request.against:
            timed |= self._guard(TRANSFORMERS, lambda: self._transformers(model, files, ids))
            if whole:
                self.rows += rows_of(TRANSFORMERS, format, timed.get(TRANSFORMERS, []), self.roof)
        return timed

    def _load(self, files: ModelFiles, options: LoadOptions, opened: Callable[[ModelFiles], Checkpoint]) -> LoadedModel:
        self._on_state(f"loading {files.name}")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return load(files, options, opened=opened)

    def _time(self, subjects: dict[str, Subject]) -> Timed:
        return measure.measure(
            subjects,
            self.request.plan,
            self._meter,
            self._limits,
            lambda name, case: self._on_state(f"{name} {case.name}"),
        )

    def _eager_ids(self, model: LoadedModel) -> list[int] | None:
        """Return the greedy tokens of a GPU without a graph; None on the CPU."""
        if self.device.type != "cuda":
            return None
        self._on_state("checking eager execution")
        ids = measure.greedy_ids(Engine(model, use_graphs=False), self._seed)
        self.same_tokens["eager"] = len(ids)
        free_memory()
        return ids

    def _host_gap(self, engine: Engine, case: BenchTest) -> float | None:
        """Return the microseconds per token that the device waits for the host; None without the fused step."""
        if self.device.type != "cuda":
            return None
        try:
            return engine.profile_step(position=case.start).host_gap_us
        except LocalqError as error:
            self.notes.append(f"host gap not measured: {error}")
            return None

    def _transformers(self, model: LoadedModel, files: ModelFiles, ids: list[int]) -> Subject:
        self._on_state("preparing transformers")
        reference, static = rivals.transformers_model(model, files), self.device.type == "cuda"
        return self._compare(TRANSFORMERS, rivals.Transformers(reference, model.ctx, self._seed, static), model, ids)

    def _bitsandbytes(self, model: LoadedModel, ids: list[int]) -> Subject:
        self._on_state("preparing bitsandbytes")
        reference = rivals.bitsandbytes_model(model, self.request.files)
        return self._compare(BITSANDBYTES, rivals.Transformers(reference, model.ctx, self._seed, False), model, ids)

    def _compare(self, name: str, subject: rivals.Transformers, model: LoadedModel, ids: list[int]) -> Subject:
        prompt = measure.prompt(measure.CHECK_PROMPT, model.vocab, self._seed)
        self.same_tokens[name] = measure.common_prefix(ids, subject.generate(prompt, measure.CHECK_TOKENS)[1])
        return subject

    def _guard(self, name: str, made: Callable[[], Subject]) -> Timed:
        """Time another engine; a failure becomes a note."""
        timed = Timed()
        with self.noting(name):
            timed |= self._time({name: made()})
        if self.device.type == "cuda":
            torch.compiler.reset()  # frees the memory of its graphs
        return timed

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Turn a failure inside into a note with its own text, so that earlier results are kept."""
        try:
            yield
        except Exception as error:  # foreign code may raise anything
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            kind = "" if isinstance(error, LocalqError) else f"{type(error).__name__}: "
            self.notes.append(f"{name} not measured: {kind}{first[:200]}")
