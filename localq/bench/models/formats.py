"""`localq bench --formats MODEL`: every format of one model in one table: size, speed, quality, time to make.

Each format is timed like `bench MODEL` and evaluated like `eval --against reference`, alone on the device. On a GPU the
16-bit model is timed in the run of the first quantized format, on the same weights (`model_bench.py`); on the CPU
separately. A format that fails has a row with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from localq.bench.models import model_bench
from localq.bench.models.format_list import Candidate, defect
from localq.bench.models.format_report import SIXTEEN, FormatLine, FormatTable
from localq.bench.models.plan import BenchPlan
from localq.bench.models.report import BASELINE, OURS, BenchReport, BenchRow
from localq.bench.quality import bits, evaluation
from localq.bench.synthetic import sources
from localq.engine.load import device as devices
from localq.engine.load.load import free_memory
from localq.errors import LocalqError
from localq.files import format_facts, stored_format
from localq.files.model_folder import ModelFiles, open_model
from localq.formats import nf4
from localq.formats.dense_checkpoint import dequantized
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions

OnState = Callable[[str], None]
STOPPED = "stopped by Ctrl-C"


@dataclass(frozen=True)
class EvaluationText:
    """The evaluation text: its bytes, its name, and the most windows of `window` tokens."""

    raw: bytes
    name: str
    most: int | None
    window: int = 2048


@dataclass(frozen=True)
class FormatsRequest:
    """A run of `bench --formats`.

    base   weights that the formats are made from; None = random weights of the catalogued model `name`
    text   None = quality is not measured
    """

    name: str
    base: Path | None
    candidates: tuple[Candidate, ...]
    options: LoadOptions
    plan: BenchPlan
    text: EvaluationText | None = None


def run(asked: FormatsRequest, on_state: OnState) -> FormatTable:
    """Measure all available formats. Raises LocalqError where none could be measured: the first reason.

    Ctrl-C ends the run with the results so far, or KeyboardInterrupt without any.
    """
    return _Formats(asked, on_state).run()


class _Formats:
    """One run: its request and its results so far."""

    def __init__(self, asked: FormatsRequest, on_state: OnState) -> None:
        self._asked, self._on_state = asked, on_state
        self._device = devices.pick(asked.options.device).device
        self._plain: FormatLine | None = None  # the 16-bit model
        self._tried = False  # its timing beside a format was tried
        self._judged: dict[str, Any] = {}  # evaluation of the last format
        self._conditions: dict[str, Any] = {}
        self._notes: list[str] = []
        self._failures: list[str] = []
        self._first: LocalqError | None = None
        self._stopped = False
        cases = asked.plan.cases
        self._decode = asked.plan.headline
        self._prefill = next((case for case in cases if case.prompt), self._decode)

    def run(self) -> FormatTable:
        on_cpu = self._device.type == "cpu"
        if on_cpu:
            self._plain = self._guard(Candidate(SIXTEEN), self._sixteen)
        lines = [self._guard(each, partial(self._line, each)) for each in self._asked.candidates]
        if self._plain is None:
            self._plain = self._guard(Candidate(SIXTEEN), self._sixteen)
        plain = self._with_reference(self._plain)
        if plain.tok_per_s is None and all(line.tok_per_s is None for line in lines):
            if self._stopped:
                raise KeyboardInterrupt
            step = f"Run `{lines[0].command}`." if lines[0].command else ""
            raise self._first or LocalqError(self._asked.name, "this model is not on this machine in any format", step)
        text = self._asked.text if self._judged else None
        return FormatTable(
            model=self._asked.name,
            lines=(plain, *lines) if on_cpu else tuple(_beside(each, plain) for each in (plain, *lines)),
            dequantized=on_cpu,
            decode=self._decode.name,
            prefill=self._prefill.name,
            synthetic=self._asked.base is None,
            conditions=self._conditions,
            text=text.name if text else "",
            window=self._judged.get("window", 0),
            n_windows=self._judged.get("n_windows", 0),
            notes=tuple(dict.fromkeys(self._notes)),
            failures=tuple(self._failures),
            stopped=self._stopped,
        )

    # ---- a format

    def _guard(self, each: Candidate, measured: Callable[[], FormatLine]) -> FormatLine:
        """Measure a format; a failure becomes a row with its reason."""
        if each.reason:
            self._failures += [f"{each.format}: {each.reason}"] if each.failed else []
            return FormatLine(each.format, reason=each.reason, command=each.command)
        if self._stopped:
            return FormatLine(each.format, reason=STOPPED, quantize_s=each.seconds)
        try:
            return measured()
        except KeyboardInterrupt:  # earlier results are still reported
            self._stopped = True
            return FormatLine(each.format, reason=STOPPED, quantize_s=each.seconds)
        except LocalqError as error:
            error.__context__ = error.__cause__ = None
            self._first = self._first or error.with_traceback(None)  # whose frames hold the model
            return FormatLine(each.format, reason=str(error), quantize_s=each.seconds)
        except Exception as error:  # a defect of one format must not lose hours of others
            return FormatLine(each.format, reason=self._defect(each.format, error), quantize_s=each.seconds)
        finally:
            free_memory()

    def _defect(self, format: str, error: Exception) -> str:
        self._failures.append(f"{format}: {defect(error)}")
        return defect(error)

    def _line(self, each: Candidate) -> FormatLine:
        files, opened = self._open(each)
        request = self._request(files, opened, self._asked.options, baseline=not self._tried and self._plain is None)
        report = model_bench.run(request, self._state_of(each.format))
        self._tried = True
        line = self._time(each.format, _variant(each, files), report, OURS)
        size = bits.size_of(files, str(report.conditions["head"]), lambda found: opened(found, self._device))
        line = replace(line, bits_per_weight=size.bits_per_weight, weights_bytes=size.weights_bytes,
                       quantize_s=each.seconds)  # fmt: skip
        if self._plain is None and report.row(BASELINE, self._decode) is not None:
            self._plain = self._with_size(self._time(SIXTEEN, "", report, BASELINE), files)
        free_memory()
        return self._with_quality(line, files)

    def _open(self, each: Candidate) -> tuple[ModelFiles, sources.Opened]:
        if each.path is None:
            return sources.random(f"{self._asked.name}@{each.format}", self._asked.plan.seed)
        return sources.from_files(each.path)

    def _request(
        self, files: ModelFiles, opened: sources.Opened, options: LoadOptions, baseline: bool = False
    ) -> model_bench.BenchRequest:
        return model_bench.BenchRequest(
            files, opened, replace(options, name=files.name), self._asked.plan, (), baseline
        )

    def _state_of(self, format: str) -> OnState:
        return lambda text: self._on_state(f"{format}: {text}")

    def _time(self, format: str, variant: str, report: BenchReport, engine: str) -> FormatLine:
        self._conditions = self._conditions or {k: v for k, v in report.conditions.items() if k != "format"}
        self._notes += report.notes
        decode, prefill = report.row(engine, self._decode), report.row(engine, self._prefill)
        assert decode is not None
        return FormatLine(
            format=format,
            variant=variant or (decode.format if format == SIXTEEN else ""),
            tok_per_s=decode.tok_per_s,
            tok_per_s_min=min(decode.samples),
            tok_per_s_max=max(decode.samples),
            share_of_roof=decode.share_of_roof,
            prefill_tok_per_s=prefill.tok_per_s if prefill is not None and prefill.case.prompt else None,
            memory_bytes=_memory(decode, report if engine == OURS else None),
            extrapolated=decode.extrapolated,
        )

    # ---- 16 bit

    def _sixteen(self) -> FormatLine:
        """Measure the 16-bit model alone, without memory savings."""
        base, options = self._asked.base, self._asked.options
        options = replace(options, kv_bits=16, vram_bytes=None, embed="device", head="16", force=False)
        if base is None:
            files, opened = sources.random(f"{self._asked.name}@fp16", self._asked.plan.seed)
        else:
            files = open_model(base)
            dtype = nf4.DTYPES.get(str(files.text_config.get("dtype", "float16")), torch.float16)

            def opened(found: ModelFiles, device: torch.device) -> Any:
                return dequantized(open_checkpoint(found), device, dtype)

        report = model_bench.run(self._request(files, opened, options), self._state_of(SIXTEEN))
        line = self._with_size(self._time(SIXTEEN, "", report, OURS), files)
        return replace(line, variant="" if self._device.type == "cpu" else str(report.conditions["dtype"]))

    def _with_size(self, line: FormatLine, files: ModelFiles) -> FormatLine:
        return replace(line, bits_per_weight=bits.UNQUANTIZED, weights_bytes=bits.dense_bytes(files))

    def _with_reference(self, line: FormatLine) -> FormatLine:
        """Add the perplexity of the 16-bit model: from the comparisons, or measured now."""
        if (known := self._judged.get("perplexity_reference")) is not None:
            return replace(line, perplexity=known)
        if self._asked.text is None or self._asked.base is None or line.tok_per_s is None or self._stopped:
            return line
        return self._with_quality(line, None, against=None)

    # ---- quality

    def _with_quality(
        self, line: FormatLine, files: ModelFiles | None, against: str | None = evaluation.REFERENCE
    ) -> FormatLine:
        """Add the quality of `files`; None = the base model."""
        text, base = self._asked.text, self._asked.base
        if text is None or base is None:
            return line
        try:
            files = files or open_model(base)
            window = min(text.window, int(files.text_config.get("max_position_embeddings", text.window)))
            request = evaluation.EvaluationRequest(
                files, replace(self._asked.options, name=files.name, ctx=None), text.raw, text.name, window, text.most,
                against, open_model(base) if against else None,
            )  # fmt: skip
            found = evaluation.run(request, lambda stage, done, total: self._on_state(f"{line.format}: {stage}"))
        except KeyboardInterrupt:
            self._stopped = True
            return replace(line, reason=STOPPED)
        except LocalqError as error:  # its speed is still known
            return replace(line, reason=f"{error}")
        except Exception as error:
            return replace(line, reason=self._defect(line.format, error))
        self._judged = found
        return replace(line, perplexity=found["perplexity"], kl=found["kl"], top1=found["top1"])


def _variant(each: Candidate, files: ModelFiles) -> str:
    return format_facts.of(each.format).random_scheme if each.path is None else stored_format.scheme_of(files)


def _memory(row: BenchRow, report: BenchReport | None) -> int | None:
    """Return the memory of the process (driver), else of the ledger."""
    used = row.process_vram_bytes or row.peak_vram_bytes
    return used or (sum(report.ledger_bytes.values()) or None if report is not None else None)


def _beside(line: FormatLine, plain: FormatLine) -> FormatLine:
    """Add the speedup over 16 bit."""
    if line.tok_per_s is None or plain.tok_per_s is None:
        return line
    return replace(line, speedup_over_fp16=line.tok_per_s / plain.tok_per_s)
