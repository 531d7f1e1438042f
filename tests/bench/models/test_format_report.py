"""What `localq bench --formats` says of its lines: tables, objects, drawings."""

from __future__ import annotations

import csv
import io
import json
from unittest.mock import Mock

import pytest

from localq.bench.models import format_report
from localq.bench.models.format_report import SIXTEEN, FormatLine, FormatTable
from localq.bench.models.report import FORMATS


def line(format: str, rate: float, **more) -> FormatLine:
    return FormatLine(format, "", 4.0, 4_000_000, rate, rate, rate, memory_bytes=2**30, **more)


TABLE = FormatTable(
    "m",
    (
        FormatLine(
            SIXTEEN, "bf16", 16.0, 16_000_000, 100.0, 99.0, 101.0, 1.0, 0.9, 1000.0, 4 * 2**30, 10.0, extrapolated=True
        ),
        line("nf4", 300.0, speedup_over_fp16=3.0, perplexity=11.0, kl=0.01, top1=0.95),
        line("vq2", 400.0, speedup_over_fp16=4.0, perplexity=14.0, kl=0.2, top1=0.8, quantize_s=60.0),
        FormatLine("awq", reason="not fetched", command="localq pull m@awq"),
        line("bcq", 200.0, reason="no text"),
    ),
    "tg128", "pp512", False, {"device": "a card", "driver": None}, False, "a text", 2048, 12, ("a note",),
)  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_every_output_ends_with_one_object(format):
    out, err = io.StringIO(), io.StringIO()
    body = format_report.write(TABLE, format, out, err)
    lines = out.getvalue().splitlines()
    assert json.loads(lines[-1]) == body
    first = "m: vq2 4.00x, nf4 3.00x the speed of bf16 in the same engine (100.0 tok/s at tg128, extrapolated)"
    assert (lines[0] if format in ("table", "md") else err.getvalue().strip()) == first
    if format == "csv":
        rows = list(csv.DictReader(io.StringIO("\n".join(lines[:-1]))))
        assert [row["format"] for row in rows] == [each.format for each in TABLE.lines]
    if format == "jsonl":
        assert [json.loads(each)["format"] for each in lines[:-1]] == [each.format for each in TABLE.lines]
    if format == "md":
        assert lines[1].startswith("| format | bits/weight | weights MB | tg128 tok/s | x fp16 |")
        assert lines[3].startswith("| 16 bit bf16 | 16.000 | 16.0 | ~100.0 | 1.00 | 90% | 1,000 |")
    if format == "table":
        assert "awq: not measured: not fetched (localq pull m@awq)" in lines
        assert "bcq: quality not measured: no text" in lines
        assert lines[-3:-1] == ["device a card", "a note"]


def test_quality_over_speed_in_the_terminal_and_as_a_picture(tmp_path, monkeypatch):
    out = io.StringIO()
    format_report.draw(TABLE, "-", out)
    lines = out.getvalue().splitlines()
    assert "perplexity vs. tok/s" in lines[0]
    assert lines[1].endswith("C")  # vq2: the fastest, and the worst
    assert lines[16].rstrip().endswith("|A")  # 16 bit
    assert lines[-3:] == ["  A  16 bit bf16: 100.0, 10.00, 4.00 GiB", "  B  nf4: 300.0, 11.00, 1.00 GiB",
                          "  C  vq2: 400.0, 14.00, 1.00 GiB"]  # fmt: skip
    spots, sides = [], []

    class Axes:
        yaxis = Mock()

        def annotate(self, label, at, xytext, ha, **more):
            sides.append((label.split(",")[0], ha, xytext[0] > 0))

        def scatter(self, x, y, s, **more):
            spots.append((x, y, s))

        def __getattr__(self, name):
            return lambda *values, **more: None

    monkeypatch.setattr(format_report.plot, "to_png", lambda target, draw_on, size, out: draw_on(Axes()))
    format_report.draw(TABLE, "a.png", out)
    assert [spot[:2] for spot in spots] == [(100.0, 10.0), (300.0, 11.0), (400.0, 14.0)]
    assert spots[0][2] == pytest.approx(4 * spots[1][2])  # area = memory
    # Names of what lies to the right are to the left of it: none is cut off.
    assert sides == [("16 bit bf16", "left", True), ("nf4", "right", False), ("vq2", "right", False)]


def test_two_formats_at_one_place_are_two_letters():
    lines = format_report.plot.spots([(1.0, 1.0), (9.0, 9.0), (9.0, 9.0), (1.0, 1.0)], ("", ""), ("", ""))
    assert lines[0].endswith(" CB")
    assert lines[15].endswith("|AD")


def test_random_weights_are_drawn_over_their_bits():
    lines = tuple(
        FormatLine(each.format, each.variant, each.bits_per_weight, tok_per_s=each.tok_per_s) for each in TABLE.lines
    )
    out = io.StringIO()
    format_report.draw(FormatTable("m", lines, "tg128", "pp512", True, {}), "-", out)
    assert "bits per weight vs. tok/s" in out.getvalue()
