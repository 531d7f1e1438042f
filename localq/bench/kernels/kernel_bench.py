"""`localq bench --kernels`: each kernel on random weights of real shapes, against fp64, the roof and its rivals.

Correctness first: a row is timed after its result was held against the reference. Times are of a cold L2 cache inside a
CUDA graph (`roofline.time_cold`), bytes are those that the operation must move, the roof is the read bandwidth measured
in the same run. Beside them: cuBLAS (F.linear with the dequantized weights in the same type, the product alone), and
bitsandbytes and Triton where they are installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TextIO

import torch

from localq import kernels
from localq.bench import plot
from localq.bench.conditions.conditions import conditions
from localq.bench.kernels import attention as attention_rows
from localq.bench.kernels import experts as expert_rows
from localq.bench.kernels import formats as format_rows
from localq.bench.kernels import roofline, shapes
from localq.bench.kernels import search as search_rows
from localq.bench.kernels import step as step_rows
from localq.bench.kernels.shapes import Workload
from localq.bench.kernels.table import FORMAT, HEADER, Row, as_json, lines
from localq.bench.kernels.timing import SEED, Bench, version_of
from localq.errors import ExitCode, LocalqError, usage_error
from localq.sanitize import print_lines, write_json

# Which kernel, cases that are done, and of how many -> what to be in while it is measured, and not while it is printed.
OnCase = Callable[[str, int, int], contextlib.AbstractContextManager[Any]]
RIVALS = ("bitsandbytes", "triton", "aqlm", "vptq")  # packages whose versions belong to the conditions
# Name -> what of a workload is to be measured; each case gives one row.
FAMILIES: dict[str, Callable[[Workload], list[Callable[[Bench], Row]]]] = {
    **{family: partial(format_rows.cases, family=family) for family in ("nf4", "gemm", "dequantize")},
    "dense": format_rows.dense_cases,
    **{
        family: partial(format_rows.cases, family=family)
        for family in ("int8", "int4", "scaled", "gguf", "rowlut", "gather", "vq")
    },
    "experts": expert_rows.cases,
    "bcq": partial(format_rows.cases, family="bcq"),
    "attention": attention_rows.cases,
    "search": search_rows.cases,
    "step": step_rows.cases,
}
BY_NAME = {"bcq trade-offs": format_rows.trade_offs}  # measured only where they are named


def run(
    out: TextIO,
    asked: str | Workload | None = None,
    families: Sequence[str] | None = None,
    replays: int = 30,
    plot_to: str | None = None,
    on_case: OnCase = lambda kernel, done, total: contextlib.nullcontext(),
) -> dict[str, Any]:
    """Measure kernels, write a table to `out`, end with one line of JSON; returns what that line says.

    `asked`: None (standard shapes), the name of a catalogued model, or "28672x8192,4096x4096"; `families`: some of
    `FAMILIES` and `BY_NAME`, all of the former by default; `plot_to`: "-" draws bars to `out`, NAME.png a picture.

    Raises LocalqError: exit 7 without a GPU or kernels, 2 for a family or shape that is none, 4 for an unknown model,
    9 for a picture that cannot be written. A kernel that gives a wrong result, or fails, is not timed: it is named in
    the table and among the "failures" of the result. One that breaks the device ends the run.
    """
    cases = _cases(asked, families)
    plot.check_target(plot_to)
    device = _device()
    probes = roofline.read_probes(device)
    roof = max(probes.values())
    bench = Bench(device, int(torch.cuda.get_device_properties(device).L2_cache_size), replays)
    facts = _facts(bench, probes)
    print_lines(out, ", ".join(f"{key} {value}" for key, value in facts.items()))
    print_lines(out, FORMAT.format(*HEADER))
    rows, failures = _table(cases, bench, roof, out, on_case)
    bars = [(f"{row.op} {row.what} x{row.rows} {row.dtype}", row.bytes_per_s / roof) for row in rows]
    title = f"{facts['device']}: share of the measured bandwidth ({roof / 1e9:.0f} GB/s)"
    if plot_to == plot.TERMINAL:
        plot.draw(bars, title, plot_to, out)
    result = {"schema": 1, **facts, "rows": [as_json(row, roof) for row in rows], "failures": failures}
    write_json(out, result)
    if plot_to not in (None, plot.TERMINAL):  # last: what can fail must not cost what was measured
        plot.draw(bars, title, plot_to, out)
    return result


def _table(
    cases: Sequence[Callable[[Bench], Row]], bench: Bench, roof: float, out: TextIO, on_case: OnCase
) -> tuple[list[Row], list[str]]:
    """Measure and print case by case; the rows, and what failed."""
    rows: list[Row] = []
    failures: list[str] = []
    for number, case in enumerate(cases):
        try:
            with on_case(_name(case).split()[0], number, len(cases)):
                row = _measured(case, bench)
        except (LocalqError, RuntimeError) as error:
            failures.append(f"{_name(case)}: {str(error).splitlines()[0]}")
            print_lines(out, f"FAILED {failures[-1]}")
            if not isinstance(error, LocalqError) and not _answers(bench.device):
                break
            continue
        if isinstance(row, Row):
            rows.append(row)
        print_lines(out, row if isinstance(row, str) else "\n".join(lines(row, roof)))
    return rows, failures


def _cases(asked: str | Workload | None, families: Sequence[str] | None) -> list[Callable[[Bench], Row]]:
    known = FAMILIES | BY_NAME
    unknown = [name for name in families or () if name not in known]
    if unknown:
        raise usage_error("--only", f"unknown kernel family {unknown[0]!r}", f"Available families: {', '.join(known)}.")
    work = asked if isinstance(asked, Workload) else shapes.workload(asked)
    return [case for name in families or FAMILIES for case in known[name](work)]


def _measured(case: Callable[[Bench], Row], bench: Bench) -> Row | str:
    """The row, or a line that says why there is none: the device has too little memory, or no kernel takes it."""
    row: Row | str
    try:
        row = case(bench)
    except torch.OutOfMemoryError as error:
        row = f"skipped {_name(case)}: not enough memory ({str(error).splitlines()[0]})"
    except ValueError as error:  # an operation refuses what it was given, by name: a shape too wide for this device
        row = f"skipped {_name(case)}: not supported by any kernel ({error})"
    torch.cuda.empty_cache()
    return row


def _answers(device: torch.device) -> bool:
    """False where CUDA has broken down, which then every later launch reports."""
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError:
        return False
    return True


def _name(case: Any) -> str:
    """A case for people: what it calls itself, or a partial with its arguments."""
    if not isinstance(case, partial):
        return str(case.name)
    return " ".join(
        [case.func.__name__.removesuffix("_row"), *(f"{key}={value}" for key, value in case.keywords.items())]
    )


def _device() -> torch.device:
    step = "`localq doctor` shows what is missing."
    if not torch.cuda.is_available():
        raise LocalqError("bench --kernels", "torch cannot use a GPU on this machine", step, ExitCode.NO_DEVICE)
    if why := kernels.why_not():
        raise LocalqError("bench --kernels", why, step, ExitCode.NO_DEVICE)
    return torch.device("cuda", torch.cuda.current_device())


def _facts(bench: Bench, probes: dict[str, float]) -> dict[str, Any]:
    build = kernels.build_info()
    return {
        **conditions(bench.device, SEED),
        "multiprocessors": torch.cuda.get_device_properties(bench.device).multi_processor_count,
        "l2_bytes": bench.cache_bytes,
        "kernels_cuda": build.cuda_version if build else None,
        **{name: version_of(name) for name in RIVALS},
        "replays": bench.replays,
        "roof_bytes_per_s": round(max(probes.values())),
        "roof_probe": max(probes, key=lambda name: probes[name]),
    }
