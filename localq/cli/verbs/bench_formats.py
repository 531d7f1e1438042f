"""`localq bench --formats MODEL`: find or make the formats, measure them, write the table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq.cli import agree, help_page, option_values, progress
from localq.cli.output import note, stderr, stdout
from localq.errors import LocalqError, usage_error
from localq.planner import budget

if TYPE_CHECKING:
    from localq.bench.models.format_list import FormatCandidates
    from localq.bench.models.formats import EvaluationText
    from localq.bench.models.plan import BenchPlan
    from localq.settings import Settings

_MAKE = "With --formats: quantize to these first (or all)."
_WINDOWS = "With --formats: perplexity windows; 0 = none."
Make = Annotated[
    str,
    typer.Option("--make", metavar="LIST", help=_MAKE, show_default=False, rich_help_panel=help_page.MODES),
]
Windows = Annotated[
    int | None,
    typer.Option(
        "--max-windows", min=0, max=option_values.MOST_WINDOWS, help=_WINDOWS, rich_help_panel=help_page.MODES
    ),
]


@dataclass(frozen=True)
class Arguments:
    """Arguments of the command line, without tests and settings."""

    model: str | None
    synthetic: bool
    output: str
    plot: str | None
    force: bool
    quiet: bool
    yes: bool
    ctx: int | None
    make: str
    windows: int | None


def of(common: Any, make: str, windows: int | None) -> Arguments:
    """The arguments of `bench` with those of the mode."""
    return Arguments(**vars(common), make=make, windows=windows)


def run(arguments: Arguments, plan: BenchPlan, settings: Settings) -> None:
    """Measure every format and print the table.

    Raises LocalqError where nothing could be measured, and (exit 1) after the table where a format failed
    unexpectedly; KeyboardInterrupt after a table that Ctrl-C cut short.
    """
    if arguments.model is None:
        raise usage_error("bench --formats", "no model given", "Specify a MODEL, such as smollm2-135m.")
    if arguments.synthetic and (arguments.make or arguments.windows is not None):
        word = "--make" if arguments.make else "--max-windows"
        raise usage_error("bench", f"{word} has no effect on random weights", "Remove the option.")
    if not any(case.generate for case in plan.cases):
        why = "the table needs at least one decode test, but -n 0 skips all decode tests"
        raise usage_error("-n", why, "Give a number of tokens.")
    from localq.bench.models import format_list

    wanted_made = format_list.to_make(arguments.make)
    found = None if arguments.synthetic else _find_candidates(arguments, settings, wanted_made)
    candidates = found.candidates if found else format_list.random()
    name = found.name if found else _catalogue_name(arguments.model)
    text = None if arguments.synthetic or arguments.windows == 0 else _text(arguments.windows)
    from localq.bench.models import format_report, formats  # torch loads only now
    from localq.cli.progress import run_bar

    loading = replace(budget.load_options(settings, name, force=arguments.force), ctx=arguments.ctx)
    with run_bar(plan.repetitions + 1, arguments.quiet) as count_run:
        wanted = formats.FormatsRequest(name, found.base if found else None, candidates, loading, plan, text)
        table = formats.run(wanted, count_run)
    format_report.write(table, arguments.output, stdout(), stderr())
    if arguments.plot is not None:
        format_report.draw(table, arguments.plot, stderr())
    if table.stopped:
        raise KeyboardInterrupt
    if table.failures:
        count = "1 format" if len(table.failures) == 1 else f"{len(table.failures)} formats"
        why = f"{count} failed; first failure: {table.failures[0]}"
        raise LocalqError("bench --formats", why, "Report this as a bug.")


def _find_candidates(arguments: Arguments, settings: Settings, wanted: tuple[str, ...]) -> FormatCandidates:
    from localq.bench.models import format_list
    from localq.files import catalog

    assert arguments.model is not None
    agree.check([catalog.resolve(arguments.model)], settings, arguments.yes)
    with progress.fetch_bar(arguments.model, arguments.quiet) as show:
        found = format_list.find(arguments.model, note, show, settings.offline)
    named = [catalog.resolve(each.made_as) for each in found.candidates if each.format in wanted and each.made_as]
    agree.check(named, settings, arguments.yes, named=True)
    return format_list.make(found, wanted, note, None, settings.offline)


def _catalogue_name(name: str) -> str:
    """The catalogue model whose shape random weights have. Raises LocalqError (exit 4) for any other."""
    from localq.files import catalog

    return catalog.find(name.rpartition("@")[0] or name).name


def _text(most: int | None) -> EvaluationText:
    from localq.bench.models.formats import EvaluationText
    from localq.cli.verbs.eval import DEFAULT_TEXT

    return EvaluationText(DEFAULT_TEXT.read_bytes(), DEFAULT_TEXT.name, most)
