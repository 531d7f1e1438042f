"""The report of `localq bench --formats`: a row for every format, and quality plotted against speed. No torch.

The last line on stdout is one JSON object with everything in it. A format that was not measured has a row too, with the
reason and the command that makes or fetches it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TextIO

from localq.bench import plot
from localq.bench.models import report
from localq.sanitize import print_lines, write_json

SCHEMA = 1
SIXTEEN = "16 bit"
PEOPLE = ("table", "md")
LARGEST_SPOT = 900.0  # area in points squared of the spot with the most memory


class PlotPoint(NamedTuple):
    """A spot of the plot: x and y of a format, and the bytes that its area shows."""

    name: str
    x: float
    y: float
    area: int


@dataclass(frozen=True)
class FormatLine:
    """One format. None = not measured, or unknown.

    format             one of `format_list.names()`, or `SIXTEEN`
    variant            scheme as in the catalogue: "s4l16"; for `SIXTEEN` the dtype
    bits_per_weight    over all quantized linears, with scales, tables and codebooks; weights_bytes: of all weights
    memory_bytes       of the process while it was timed (driver), else by the engine's ledger
    kl, top1           against the 16-bit weights: nats per token, fraction of tokens
    quantize_s         time to quantize on this machine
    reason, command    why it was not measured, and how to make or fetch it
    """

    format: str
    variant: str = ""
    bits_per_weight: float | None = None
    weights_bytes: int | None = None
    tok_per_s: float | None = None
    tok_per_s_min: float | None = None
    tok_per_s_max: float | None = None
    speedup_over_fp16: float | None = None
    share_of_roof: float | None = None
    prefill_tok_per_s: float | None = None
    memory_bytes: int | None = None
    perplexity: float | None = None
    kl: float | None = None
    top1: float | None = None
    quantize_s: float | None = None
    extrapolated: bool = False
    reason: str = ""
    command: str = ""

    @property
    def name(self) -> str:
        """The format with its variant, for people."""
        return f"{self.format} {self.variant}".strip()


@dataclass(frozen=True)
class FormatTable:
    """The report of one run.

    decode, prefill   the tests
    dequantized       all formats were dequantized at load time (on the CPU), so speeds do not compare formats
    text, window      the evaluation text; "" and 0 = quality not measured
    failures          unexpected failures
    stopped           by Ctrl-C, so formats are missing
    """

    model: str
    lines: tuple[FormatLine, ...]
    decode: str
    prefill: str
    synthetic: bool
    conditions: dict[str, Any]
    dequantized: bool = False
    text: str = ""
    window: int = 0
    n_windows: int = 0
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = field(default=())
    stopped: bool = False

    @property
    def measured_lines(self) -> list[FormatLine]:
        """The rows with a speed."""
        return [line for line in self.lines if line.tok_per_s is not None]

    def first_line(self) -> str:
        """Return the headline: the speedups over fp16, the best first."""
        factors = sorted(((line.speedup_over_fp16, line.format) for line in self.measured_lines
                       if line.speedup_over_fp16 and line.format != SIXTEEN), reverse=True)  # fmt: skip
        base = next((line for line in self.measured_lines if line.format == SIXTEEN), None)
        speedups = ", ".join(f"{name} {factor:.2f}x" for factor, name in factors)
        if base is None or base.tok_per_s is None or not speedups:
            why = (
                "on the CPU, all formats are dequantized, so their speeds are similar"
                if self.dequantized
                else "no fp16 baseline"
            )
            return f"{self.model}: {len(self.measured_lines)} of {len(self.lines)} formats measured; {why}"
        how = ", extrapolated" if base.extrapolated else ""
        fp16 = f"{base.variant} in the same engine ({base.tok_per_s:.1f} tok/s at {self.decode}{how})"
        return f"{self.model}: {speedups} the speed of {fp16}"

    def to_dict(self) -> dict[str, Any]:
        """Return the whole report, for the last line."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "synthetic": self.synthetic,
            "dequantized": self.dequantized,
            "decode_test": self.decode,
            "prefill_test": self.prefill,
            "text": self.text or None,
            "window": self.window or None,
            "n_windows": self.n_windows or None,
            "conditions": self.conditions,
            "notes": list(self.notes),
            "failures": list(self.failures),
            "stopped": self.stopped,
            "rows": [asdict(line) for line in self.lines],
        }


def write(table: FormatTable, format: str, out: TextIO, err: TextIO) -> dict[str, Any]:
    """Write `table` in one of `report.FORMATS`; returns the object of the last line."""
    body = table.to_dict()
    print_lines(out if format in PEOPLE else err, table.first_line())
    if format in PEOPLE:
        headers, cells = columns(table)
        lines = report.markdown(headers, cells, 1) if format == "md" else report.text_table(headers, cells, 1)
        print_lines(out, *lines)
        print_lines(out, *_below(table))
    elif format == "csv":
        print_lines(out, report.csv_text(body["rows"]).removesuffix("\n"))
    elif format == "jsonl":
        for row in body["rows"]:
            write_json(out, row)
    write_json(out, body)
    return body


def columns(table: FormatTable) -> tuple[list[str], list[list[str]]]:
    """Return headers and cells of the measured rows; columns without a number are omitted."""
    every: list[tuple[str, Callable[[FormatLine], str]]] = [
        ("format", lambda line: line.name),
        ("bits/weight", lambda line: _cell_text(line.bits_per_weight, 1, ".3f")),
        ("weights MB", lambda line: _cell_text(line.weights_bytes, 1e-6, ",.1f")),
        (
            f"{table.decode} tok/s",
            lambda line: ("~" if line.extrapolated else "") + _cell_text(line.tok_per_s, 1, ".1f"),
        ),
        ("x fp16", lambda line: _cell_text(line.speedup_over_fp16, 1, ".2f")),
        ("bandwidth", lambda line: _cell_text(line.share_of_roof, 1, ".0%")),
        (f"{table.prefill} tok/s", lambda line: _cell_text(line.prefill_tok_per_s, 1, ",.0f")),
        ("memory GiB", lambda line: _cell_text(line.memory_bytes, 2**-30, ".2f")),
        ("perplexity", lambda line: _cell_text(line.perplexity, 1, ".3f")),
        ("KL", lambda line: _cell_text(line.kl, 1, ".4f")),
        ("top-1", lambda line: _cell_text(line.top1, 1, ".1%")),
        ("quantize s", lambda line: _cell_text(line.quantize_s, 1, ",.1f")),
    ]
    kept = [
        (name, cell)
        for name, cell in every
        if name == "format" or {cell(line) for line in table.measured_lines} - {"-"}
    ]
    return [name for name, _ in kept], [[cell(line) for _, cell in kept] for line in table.measured_lines]


def _below(table: FormatTable) -> list[str]:
    """Return the lines below the table: what was not measured and why, the text, conditions and notes."""
    lines = []
    for line in table.lines:
        if line.reason:
            what = "quality not measured" if line.tok_per_s is not None else "not measured"
            lines.append(f"{line.name}: {what}: {line.reason}{f' ({line.command})' if line.command else ''}")
    windows = "1 window" if table.n_windows == 1 else f"{table.n_windows} windows"
    if table.text:
        lines.append(f"perplexity, KL and top-1 measured against 16-bit on {windows} of {table.window} tokens from "
                     f"{table.text}")  # fmt: skip
    facts = [f"{name.replace('_', ' ')} {value}" for name, value in table.conditions.items() if value is not None]
    return [*lines, ", ".join(facts), *table.notes]


def _cell_text(value: float | None, scale: float, form: str) -> str:
    return "-" if value is None else format(value * scale, form)


# ---- quality against speed


def draw(table: FormatTable, target: str, out: TextIO) -> None:
    """Plot perplexity (else bits per weight) over tok/s; the area of a spot shows its memory.

    To `out` for "-", else a PNG, as `plot.draw` does. Dequantized formats are plotted over the size of the weights,
    because their speeds differ only by chance.
    """
    judged = any(line.perplexity is not None for line in table.measured_lines)
    what = "perplexity" if judged else "bits per weight"
    across = "weights in MB" if table.dequantized else f"tok/s at {table.decode}"
    points = []
    for line in table.measured_lines:
        x = (line.weights_bytes or 0) / 1e6 if table.dequantized else line.tok_per_s
        y = line.perplexity if judged else line.bits_per_weight
        if x and y:
            points.append(PlotPoint(line.name, x, y, line.memory_bytes or 0))
    if not points:
        return
    title = f"{table.model}: {what} vs. {across}"
    if target == plot.TERMINAL:
        print_lines(out, title, *_in_terminal(points, across))
    else:
        by_area = f"{title}; area = memory"
        plot.to_png(target, lambda axes: _spots(axes, points, by_area, (across, what)), (8, 5), out)


def _in_terminal(points: Sequence[PlotPoint], across: str) -> list[str]:
    """Return the plot as lines of text, with memory beside the names."""
    xs, ys = [point.x for point in points], [point.y for point in points]
    places = [(point.x, math.log(point.y)) for point in points]
    drawn = plot.spots(places, (f"{min(xs):.1f}", f"{max(xs):.1f} {across}"), (f"{min(ys):.2f}", f"{max(ys):.2f}"))
    named = (f"{each.name}: {each.x:.1f}, {each.y:.2f}, {each.area / 2**30:.2f} GiB" for each in points)
    return [*drawn, *plot.legend(list(named))]


def _spots(axes: Any, points: Sequence[PlotPoint], title: str, names: tuple[str, str]) -> None:
    most = max((point.area for point in points), default=0) or 1
    for point, colour in zip(points, itertools.cycle(f"C{number}" for number in range(10)), strict=False):
        area = LARGEST_SPOT * max(point.area, 0.01 * most) / most
        axes.scatter(point.x, point.y, s=area, alpha=0.5, color=colour)
        label = f"{point.name}, {point.area / 2**30:.1f} GiB" if point.area else point.name
        away = 2 + math.sqrt(area) / 2
        plot.name_spot(axes, label, (point.x, point.y), away, [each.x for each in points])
    axes.set_yscale("log")
    plot.in_logarithms(axes.yaxis)
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    axes.set_title(title)
    axes.margins(x=0.2, y=0.2)
