"""`localq bench --formats MODEL` as the command line has it: what is here is found, what is missing made if asked for,
and the table written."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from localq.cli import progress
from localq.cli.output import note
from localq.errors import LocalqError, usage_error
from localq.planner import budget

if TYPE_CHECKING:
    from localq.bench.models.format_list import Found
    from localq.bench.models.formats import Text
    from localq.bench.models.plan import Plan
    from localq.settings import Settings

_MAKE = "With --formats: quantize these first where they are missing, minutes to hours: nf4,vq2,... or all."
_WINDOWS = "With --formats: judge quality on so many windows, 0 = not at all."
Make = Annotated[str, typer.Option("--make", metavar="LIST", help=_MAKE, show_default=False)]
Windows = Annotated[int | None, typer.Option("--max-windows", min=0, help=_WINDOWS)]


@dataclass(frozen=True)
class Asked:
    """What the command line says, less the tests and the settings."""

    model: str | None
    synthetic: bool
    output: str
    plot: str | None
    force: bool
    quiet: bool
    ctx: int | None
    make: str
    windows: int | None


def run(asked: Asked, plan: Plan, settings: Settings) -> None:
    """Measure and tell. Raises LocalqError where nothing could be measured, and (exit 1) after the table where a format
    failed in a way that it should not; after a table that Ctrl-C has cut short KeyboardInterrupt."""
    if asked.model is None:
        raise usage_error("bench --formats", "no model is named", "Give MODEL, such as smollm2-135m.")
    if asked.synthetic and (asked.make or asked.windows is not None):
        word = "--make" if asked.make else "--max-windows"
        raise usage_error("bench", f"{word} has no meaning for random weights", "Leave it out.")
    if not any(case.generate for case in plan.cases):
        raise usage_error("-n", "the table is about decode, and 0 leaves it out", "Give it a number of tokens.")
    from localq.bench.models import format_list

    wanted_made = format_list.to_make(asked.make)
    found = None if asked.synthetic else _found(asked, settings, wanted_made)
    candidates = found.candidates if found else format_list.random()
    name = found.name if found else _catalogued(asked.model)
    text = None if asked.synthetic or asked.windows == 0 else _text(asked.windows)
    from localq.bench.models import format_report, formats  # torch loads only now
    from localq.cli.progress import run_bar
    from localq.engine.load.load import Options

    loading = Options(
        name, settings.device, settings.dtype, asked.ctx, settings.kv_bits, budget.allowed(settings),
        settings.embed, settings.head, budget.reserved(settings), asked.force,
    )  # fmt: skip
    with run_bar(plan.repetitions + 1, asked.quiet) as tell:
        wanted = formats.Asked(name, found.base if found else None, candidates, loading, plan, text)
        table = formats.run(wanted, tell)
    format_report.write(table, asked.output, sys.stdout, sys.stderr)
    if asked.plot is not None:
        format_report.draw(table, asked.plot, sys.stderr)
    if table.stopped:
        raise KeyboardInterrupt
    if table.failures:
        why = f"{len(table.failures)} formats failed, the first: {table.failures[0]}"
        raise LocalqError("bench --formats", why, "Report this as a bug.")


def _found(asked: Asked, settings: Settings, wanted: tuple[str, ...]) -> Found:
    from localq.bench.models import format_list

    assert asked.model is not None
    with progress.fetch_bar(asked.model, asked.quiet) as show:
        found = format_list.find(asked.model, note, show, settings.offline)
    return format_list.make(found, wanted, note, None, settings.offline)


def _catalogued(name: str) -> str:
    """The model whose shape random weights have. Raises LocalqError (exit 4) for another than a catalogued one."""
    from localq.files import catalog

    return catalog.find(name.rpartition("@")[0] or name).name


def _text(most: int | None) -> Text:
    from localq.bench.models.formats import Text
    from localq.cli.verbs.eval import DEFAULT_TEXT

    return Text(DEFAULT_TEXT.read_bytes(), DEFAULT_TEXT.name, most)
