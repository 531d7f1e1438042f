"""`localq eval` of several models on the same text, one after the other: a table, and quality plotted against size.

The reference is the same for all: with several models `reference` means the weights of the first, and all must have its
vocabulary. A failure of one model is reported and does not stop the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

from localq.bench import plot
from localq.bench.quality import tasks
from localq.bench.quality.evaluation import REFERENCE, EvaluationRequest, run
from localq.engine.load.load import free_memory
from localq.errors import LocalqError
from localq.sanitize import print_lines
from localq.wording import OnProgress

Point = tuple[str, float, float]  # model, bytes, perplexity


def run_all(
    requests: Sequence[EvaluationRequest], on_progress: OnProgress
) -> tuple[list[dict[str, Any]], list[LocalqError]]:
    """Evaluate each request; returns results and errors. A single request raises its error."""
    first = requests[0]
    if first.against in (None, REFERENCE) and len(requests) > 1:
        requests = [replace(each, rival=first.files) for each in requests]
    found, failed = [], []
    for request in requests:
        try:
            found.append(run(request, partial(_tell, on_progress, request.options.name)))
        except LocalqError as error:
            if len(requests) == 1:
                raise
            error.__context__ = error.__cause__ = None
            failed.append(error.with_traceback(None))  # its frames hold the model, whose memory the next one needs
        free_memory()
    return found, failed


def _tell(on_progress: OnProgress, name: str, stage: str, done: int, total: int) -> None:
    on_progress(f"{name}: {stage}", done, total)


def table(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows; columns that were not measured are omitted."""
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("model", lambda each: str(each["model"])),
        ("format", lambda each: str(each["format"])),
        ("bits/weight", lambda each: f"{each['bits_per_weight']:.3f}"),
        ("weights MB", lambda each: f"{each['weights_bytes'] / 1e6:.1f}"),
        ("perplexity", lambda each: f"{each['perplexity']:.4f}"),
        ("llama.cpp", lambda each: f"{each['perplexity_llamacpp']:.4f}"),
    ]
    if any(each["against"] is not None for each in results):
        columns += [("KL", lambda each: f"{each['kl']:.3e}"), ("top-1", lambda each: f"{each['top1']:.2%}")]
    if any(each["speed"] for each in results):
        test = results[0]["speed"]["test"]
        columns += [
            (f"{test} tok/s", lambda each: f"{each['speed']['tok_per_s']:.1f}"),
            ("peak GiB", lambda each: f"{each['speed']['peak_bytes'] / 2**30:.2f}"),
        ]
    if any(each["tasks"] for each in results):
        columns += [(kind, partial(_score, kind)) for kind in tasks.KINDS]
    return [name for name, _ in columns], [[cell(each) for _, cell in columns] for each in results]


def _score(kind: str, result: dict[str, Any]) -> str:
    return f"{result['tasks'][kind]['correct']}/{result['tasks'][kind]['n']}"


# ---- quality against size


def draw(results: Sequence[dict[str, Any]], target: str, out: TextIO) -> None:
    """Plot perplexity over the size of the weights: to `out` for "-", else a PNG, as `plot.draw` does."""
    points = [(str(each["model"]), float(each["weights_bytes"]), float(each["perplexity"])) for each in results]
    title = f"perplexity on {results[0]['text']} vs. weight size"
    if target == plot.TERMINAL:
        print_lines(out, *grid(points, title))
    else:
        plot.to_png(target, lambda axes: _scatter(axes, points, title), (8, 5), out)


def grid(points: Sequence[Point], title: str) -> list[str]:
    """Return the plot as lines of text: a letter per point, size to the right, log of perplexity upwards."""
    sizes, values = [size for _, size, _ in points], [value for _, _, value in points]
    ends = f"{min(sizes) / 1e6:.1f} MB", f"{max(sizes) / 1e6:.1f} MB"
    places = [(size, math.log(value)) for _, size, value in points]
    drawn = plot.spots(places, ends, (f"{min(values):.2f}", f"{max(values):.2f}"))
    named = [f"{name}: {size / 1e6:.1f} MB, {value:.2f}" for name, size, value in points]
    return [title, *drawn, *plot.legend(named)]


def _scatter(axes: Any, points: Sequence[Point], title: str) -> None:
    for name, size, value in points:
        axes.plot(size / 1e6, value, "o")
        plot.name_spot(axes, name, (size / 1e6, value), 6, [each / 1e6 for _, each, _ in points])
    axes.set_yscale("log")
    plot.in_logarithms(axes.yaxis)
    axes.set_xlabel("weights in MB")
    axes.set_ylabel("perplexity")
    axes.set_title(title)
