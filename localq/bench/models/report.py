"""The report of a benchmark: rows, the headline, and the output formats of `-o`. No torch.

The last line on stdout is always one JSON object with everything in it (`"schema": 1`, units in the key names). Formats
for people start with the speedup over fp16; `csv`, `json` and `jsonl` print only data to stdout, and the headline to
stderr.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from localq.bench.conditions import power
from localq.bench.models.plan import BenchTest
from localq.sanitize import print_lines, write_json

SCHEMA = 1
FORMATS = ("table", "md", "csv", "json", "jsonl")
OURS, BASELINE = "localq", "localq fp16"
COLUMNS = ("engine", "format", "test", "tok/s", "min-max", "ms/token", "TTFT ms", "MB/token", "bandwidth", "x fp16",
           "GiB", "J/token")  # fmt: skip


@dataclass(frozen=True)
class BenchRow:
    """One engine on one test. None = not measured, not reported, or not applicable.

    tok_per_s            median of `samples`, tok/s of every run
    bytes_per_token      that a decode step must read; share_of_roof: fraction of the measured read bandwidth
    peak_vram_bytes      peak allocation of torch; process_vram_bytes: of the process, with its context (NVML)
    predicted_tok_per_s  of `localq fit` for this GPU, at the depth of the test
    extrapolated         from two cuts of the model, because it does not fit as a whole
    held_down            cause -> fraction of the time in which the driver lowered the clocks for it (`power.Throttle`)
    """

    engine: str
    format: str
    case: BenchTest
    samples: tuple[float, ...]
    tok_per_s: float
    first_token_s: float | None = None
    bytes_per_token: int | None = None
    share_of_roof: float | None = None
    joules_per_token: float | None = None
    peak_vram_bytes: int | None = None
    process_vram_bytes: int | None = None
    host_gap_us: float | None = None
    predicted_tok_per_s: float | None = None
    extrapolated: bool = False
    held_down: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return a flat dict, for JSON and CSV."""
        first = None if self.first_token_s is None else round(self.first_token_s * 1e3, 3)
        return {
            "engine": self.engine,
            "format": self.format,
            "test": self.case.name,
            "n_prompt": self.case.prompt,
            "n_gen": self.case.generate,
            "n_depth": self.case.depth,
            "tok_per_s": round(self.tok_per_s, 2),
            "tok_per_s_min": round(min(self.samples), 2),
            "tok_per_s_max": round(max(self.samples), 2),
            "ms_per_token": round(1e3 / self.tok_per_s, 4),
            "time_to_first_token_ms": first,
            "bytes_per_token": self.bytes_per_token,
            "share_of_roof": _round(self.share_of_roof, 4),
            "joules_per_token": _round(self.joules_per_token, 4),
            "peak_vram_bytes": self.peak_vram_bytes,
            "process_vram_bytes": self.process_vram_bytes,
            "host_gap_us": _round(self.host_gap_us, 2),
            "predicted_tok_per_s": _round(self.predicted_tok_per_s, 2),
            "repetitions": len(self.samples),
            "extrapolated": self.extrapolated,
            **{f"held_down_for_{cause}": _round(self.held_down.get(cause), 3) for cause in power.POLICIES},
        }


@dataclass(frozen=True)
class BenchReport:
    """The report of one run.

    same_tokens      comparison -> number of leading greedy tokens, of `checked_tokens`, that agree
    why_no_fp16      shown where there is no speedup over fp16
    ledger_bytes     component -> bytes allocated by localq; predicted_bytes: as planned before the load
    """

    model: str
    rows: tuple[BenchRow, ...]
    headline: BenchTest
    conditions: dict[str, Any]
    roof_bytes_per_s: float
    checked_tokens: int = 0
    same_tokens: dict[str, int] = field(default_factory=dict)
    ledger_bytes: dict[str, int] = field(default_factory=dict)
    predicted_bytes: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    why_no_fp16: str = "no fp16 baseline: the model is not quantized"

    def row(self, engine: str, case: BenchTest) -> BenchRow | None:
        """Return the row of that engine and test."""
        return next((row for row in self.rows if row.engine == engine and row.case == case), None)

    def speedup(self, rival: str, case: BenchTest) -> float | None:
        """Return localq's tok/s over the rival's, None where one of them is missing."""
        ours, theirs = self.row(OURS, case), self.row(rival, case)
        return ours.tok_per_s / theirs.tok_per_s if ours and theirs else None

    @property
    def rivals(self) -> list[str]:
        """All engines but localq, in the order of the rows."""
        return [name for name in dict.fromkeys(row.engine for row in self.rows) if name != OURS]

    @property
    def memory(self) -> tuple[int, int] | None:
        """GPU bytes: predicted before the load, and used by the process (driver, else ledger); None on the CPU."""
        if "cuda_context" not in self.ledger_bytes:
            return None
        used = next((row.process_vram_bytes for row in self.rows if row.engine == OURS), None)
        return sum(self.predicted_bytes.values()), used or sum(self.ledger_bytes.values())

    def memory_line(self) -> str:
        """Return predicted and used memory in a line; empty on the CPU."""
        if self.memory is None:
            return ""
        predicted, taken = self.memory
        more = f"{(taken - predicted) / 2**20:+,.0f} MiB, {taken / predicted - 1:+.1%}"
        return f"memory: predicted {predicted / 2**30:.2f} GiB, used {taken / 2**30:.2f} GiB ({more})"

    def speed_line(self) -> str:
        """Return the predictions of `localq fit` in a line; empty where it has none."""
        predicted = [(row, row.predicted_tok_per_s) for row in self.rows if row.engine == OURS]
        texts = [
            f"{rate:.1f} tok/s at {row.case.name} ({rate / row.tok_per_s - 1:+.1%})"
            for row, rate in predicted
            if rate is not None
        ]
        return f"predicted by `localq fit`: {', '.join(texts)}" if texts else ""

    def clocks_line(self) -> str:
        """Return the rows that ran with lowered clocks in a line; empty where none did."""
        rows = [f"{row.engine} {row.case.name} {text}" for row in self.rows if (text := power.summary(row.held_down))]
        return f"throttled by the driver (share of time): {'; '.join(rows)}" if rows else ""

    def first_line(self) -> str:
        """Return the headline: the speedup over fp16, or why there is none, and the speed."""
        ours = self.row(OURS, self.headline)
        assert ours is not None  # localq itself is always measured
        speed = f"{self.model}: {ours.tok_per_s:.1f} tok/s at {self.headline.name}"
        fp16 = self.row(BASELINE, self.headline)
        factor = self.speedup(BASELINE, self.headline)
        if fp16 is None or factor is None:
            others = ", ".join(
                f"{value:.2f}x {name}" for name in self.rivals if (value := self.speedup(name, self.headline))
            )
            return f"{others or 'no comparison'} ({speed}; {self.why_no_fp16})"
        how = ", extrapolated" if fp16.extrapolated else ""
        return f"{speed}, {factor:.2f}x the speed of {fp16.format} in the same engine ({fp16.tok_per_s:.1f} tok/s{how})"

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report, for the last line."""
        cases = dict.fromkeys(row.case for row in self.rows)
        predicted, taken = self.memory or (None, None)
        return {
            "schema": SCHEMA,
            "model": self.model,
            "speedup_over_fp16": _round(self.speedup(BASELINE, self.headline), 3),
            "fp16_extrapolated": any(row.extrapolated for row in self.rows if row.engine == BASELINE),
            "speedups": {
                case.name: {
                    name: _round(value, 3) for name in self.rivals if (value := self.speedup(name, case)) is not None
                }
                for case in cases
            },
            "roof_bytes_per_s": round(self.roof_bytes_per_s),
            "checked_tokens": self.checked_tokens,
            "same_tokens": self.same_tokens,
            "ledger_bytes": self.ledger_bytes,
            "predicted_bytes": self.predicted_bytes,
            "predicted_vram_bytes": predicted,
            "taken_vram_bytes": taken,
            "conditions": self.conditions,
            "notes": list(self.notes),
            "rows": [row.to_dict() for row in self.rows],
        }


def write(report: BenchReport, format: str, out: TextIO, err: TextIO) -> dict[str, Any]:
    """Write `report` in one of `FORMATS`; returns the object of the last line."""
    body, people = report.to_dict(), format in ("table", "md")
    print_lines(out if people else err, report.first_line())
    if people:
        cells = [_cells(row, report) for row in report.rows]
        print_lines(out, *(markdown if format == "md" else text_table)(COLUMNS, cells, 3))
        facts = [f"{name.replace('_', ' ')} {value}" for name, value in report.conditions.items() if value is not None]
        print_lines(out, f"measured read bandwidth {report.roof_bytes_per_s / 1e9:.0f} GB/s; {', '.join(facts)}")
        for note in filter(None, (report.memory_line(), report.speed_line(), report.clocks_line(), *report.notes)):
            print_lines(out, note)
    elif format == "csv":
        print_lines(out, csv_text(body["rows"]).removesuffix("\n"))
    elif format == "jsonl":
        for row in body["rows"]:
            write_json(out, row)
    write_json(out, body)
    return body


def _cells(row: BenchRow, report: BenchReport) -> list[str]:
    factor = report.speedup(BASELINE, row.case) if row.engine == OURS else None
    fp16 = report.row(BASELINE, row.case)
    about = "~" if factor and fp16 and fp16.extrapolated else ""
    memory = row.process_vram_bytes or row.peak_vram_bytes
    return [
        row.engine + (" (extrapolated)" if row.extrapolated else ""),
        row.format,
        row.case.name,
        f"{row.tok_per_s:.1f}",
        "-" if row.extrapolated else f"{min(row.samples):.1f}-{max(row.samples):.1f}",
        f"{1e3 / row.tok_per_s:.3f}",
        _cell_text(row.first_token_s, 1e3, ".1f"),
        _cell_text(row.bytes_per_token, 1e-6, ".1f"),
        _cell_text(row.share_of_roof, 1, ".0%"),
        about + _cell_text(factor, 1, ".2f"),
        _cell_text(memory, 2**-30, ".2f"),
        _cell_text(row.joules_per_token, 1, ".3f"),
    ]


def _cell_text(value: float | None, scale: float, form: str) -> str:
    return "-" if value is None else format(value * scale, form)


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def markdown(headers: Sequence[str], cells: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return a Markdown table; the first `left` columns are text, the others numbers."""
    dashes = [*left * ["---"], *(len(headers) - left) * ["---:"]]
    return [f"| {' | '.join(line)} |" for line in (headers, dashes, *cells)]


def text_table(headers: Sequence[str], cells: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the table for a terminal."""
    lines = [headers, *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return CSV of rows with the same keys."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
