"""Plots: bars, or lettered spots, in the terminal or as a PNG."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from localq import disk
from localq.errors import ExitCode, LocalqError, usage_error
from localq.sanitize import print_lines

BAR = 40  # characters of 100 %
TERMINAL = "-"  # the plot's file name that means the terminal

COLUMNS, LINES = 64, 16  # of spots in a terminal
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

Bar = tuple[str, float]  # label, fraction of the bandwidth


def draw(bars: Sequence[Bar], title: str, target: str, out: TextIO) -> None:
    """Draw bars to `out` for "-", else to a PNG at `target`, which the caller names on stderr.

    Raises LocalqError: exit 1 where matplotlib is missing, 9 where the file cannot be written.
    """
    if target == TERMINAL:
        _to_terminal(bars, title, out)
    else:
        to_png(target, lambda axes: _bars(axes, bars, title), (10, 1 + 0.28 * len(bars)))


def check_target(target: str | None) -> None:
    """Check before the measurement that `draw` can write to `target`."""
    if target is None or target == TERMINAL:
        return
    if not target.endswith(".png"):
        raise usage_error("--plot", f"{target!r} is not a PNG file name", 'Use "-" for the terminal, or NAME.png.')
    folder = Path(target).absolute().parent
    if not folder.is_dir():
        raise usage_error("--plot", f"the parent folder of {target!r} does not exist", "Create it first.")
    if Path(target).is_dir() or not os.access(folder, os.W_OK):
        raise usage_error("--plot", f"{target!r} cannot be written", "Choose another file.")
    _pyplot()


def _to_terminal(bars: Sequence[Bar], title: str, out: TextIO) -> None:
    from rich.bar import Bar as RichBar  # start-up cost: plots are rare
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=None, show_header=False, title_justify="left")
    table.add_column(justify="left", no_wrap=True)
    table.add_column(width=BAR)
    table.add_column(justify="right")
    for name, share in bars:
        table.add_row(name, RichBar(1.0, 0.0, min(max(share, 0.0), 1.0), width=BAR), f"{share:.0%}")
    lines = io.StringIO()
    Console(file=lines, width=120, force_terminal=False).print(table)
    print_lines(out, lines.getvalue().removesuffix("\n"))


def spots(points: Sequence[tuple[float, float]], sides: tuple[str, str], heights: tuple[str, str]) -> list[str]:
    """Return lines of text with a letter for each (x, y); sides, heights: labels of the ends of x and y."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    cells = [[" "] * COLUMNS for _ in range(LINES)]
    for letter, x, y in zip(itertools.cycle(LETTERS), xs, ys, strict=False):
        column, line = _place(x, xs, COLUMNS), LINES - 1 - _place(y, ys, LINES)
        free = [(abs(at - column), -at) for at in range(COLUMNS) if cells[line][at] == " "]
        cells[line][-min(free, default=(0, -column))[1]] = letter  # two at one place are drawn side by side
    labels = {0: heights[1], LINES - 1: heights[0]}
    lines = [f"{labels.get(number, ''):>10} |{''.join(row)}".rstrip() for number, row in enumerate(cells)]
    return [*lines, f"{'':>10} +{'-' * COLUMNS}", f"{'':>11} {sides[0]}{sides[1]:>{COLUMNS - len(sides[0])}}"]


def legend(lines: Sequence[str]) -> list[str]:
    """Return the legend of the letters of `spots`."""
    return [f"  {letter}  {each}" for letter, each in zip(itertools.cycle(LETTERS), lines, strict=False)]


def _place(value: float, values: Sequence[float], cells: int) -> int:
    low, high = min(values), max(values)
    return round((value - low) / (high - low) * (cells - 1)) if high > low else 0


def to_png(target: str, draw_on: Callable[[Any], None], size: tuple[float, float], out: TextIO | None = None) -> None:
    """Write a PNG of `size` inches with `draw_on`; a line on `out`, if given, names it."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    draw_on(axes)
    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=120, format="png")
    finally:
        pyplot.close(figure)
    try:
        file = disk.LazyOutput(Path(target))
        file.write(content.getvalue())
        file.close()
    except LocalqError as error:
        why = f"{target} cannot be written ({getattr(error.__cause__, 'strerror', None) or error.why})"
        raise LocalqError("--plot", why, "Choose another file.", ExitCode.DISK) from error
    if out is not None:
        print_lines(out, file_line(target))


def file_line(target: str) -> str:
    """The line on stderr that names a PNG."""
    return f"plot: {target}"


def name_spot(axes: Any, label: str, at: tuple[float, float], away: float, xs: Sequence[float]) -> None:
    """Label a spot, `away` points from its centre, on the left in the right half of `xs`."""
    left = at[0] > (min(xs) + max(xs)) / 2
    offset, side = (-away, "right") if left else (away, "left")
    axes.annotate(label, at, textcoords="offset points", xytext=(offset, 4), ha=side, fontsize=8)


def in_logarithms(axis: Any) -> None:
    """Label a log axis with values, not powers of ten: perplexities of one model span less than one."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("{x:g}")


def _bars(axes: Any, bars: Sequence[Bar], title: str) -> None:
    names, shares = [name for name, _ in bars], [100 * share for _, share in bars]
    axes.barh(range(len(bars)), shares)
    axes.set_yticks(range(len(bars)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the measured read bandwidth")
    axes.set_title(title)


def _pyplot() -> Any:
    try:
        import matplotlib  # type: ignore[import-not-found,unused-ignore]

        matplotlib.use("agg")
        from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError as error:
        step = 'Install it (`python -m pip install matplotlib`), or plot to the terminal with "-".'
        raise LocalqError("--plot", "matplotlib is not installed", step) from error
    return pyplot
