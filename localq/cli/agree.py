"""The question before a download or a quantization of more than 1 GB, and --yes, which answers it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localq.cli import help_page
from localq.cli.output import note, stderr
from localq.wording import human_bytes

if TYPE_CHECKING:
    from localq.files.catalog import Target
    from localq.planner.consent import OpenCost
    from localq.settings import Settings

Yes = Annotated[
    bool,
    typer.Option("--yes", "-y", help="Download more than 1 GB without asking.", rich_help_panel=help_page.MODEL),
]


def ask(costs: Sequence[OpenCost], *, named: bool = False) -> bool:
    """Ask whether to start what takes more than 1 GB, or was not named by the user; True if nothing does.

    Without a terminal downloads start. Quantizing raises LocalqError (exit 2) there, unless it is `named`: asked for by
    its own verb.
    """
    from localq.planner import consent  # start-up cost: only what is not here needs it

    large = [each for each in costs if each.is_large or each.why]
    if not large:
        return True
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, stderr())):
        made = next((each for each in large if each.make_s is not None), None)
        if made is not None and not named:
            raise consent.needs_yes(made)
        return True
    for cost in large:
        if len(large) > 1:
            note(f"{cost.name}:")
        for line in cost.lines():
            note(line)
    title = f"Download {human_bytes(consent.total(large))} in total?" if len(large) > 1 else large[0].title
    return typer.confirm(title, default=all(each.make_s is None for each in large), err=True)


def check(
    targets: Sequence[Target], settings: Settings, yes: bool, *, named: bool = False, revision: str | None = None,
    again: Sequence[Target] = (),
) -> None:  # fmt: skip
    """Ask about what is not on this machine, unless `yes`.

    revision   of the targets, instead of their own
    again      targets that are on this machine and are quantized again

    Raises LocalqError where the user declines, and as `ask`.
    """
    if yes:
        return
    from localq.planner import consent, open_cost

    every = [open_cost.of(each, settings, revision=revision, again=each in again) for each in targets]
    costs = [cost for cost in every if cost is not None]
    if not ask(costs, named=named):
        raise consent.declined(", ".join(each.name for each in targets))


def check_quantize(source: str, format: str, out: Path, settings: Settings, *, keep_source: bool = False) -> None:
    """As `check`, for `localq quantize`; `keep_source` as in `open_cost.of_quantizing`."""
    from localq.files import catalog  # start-up cost, as above
    from localq.planner import consent, open_cost

    cost = open_cost.of_quantizing(catalog.resolve(source), format, out, settings, keep_source=keep_source)
    if cost is not None and not ask([cost], named=True):
        raise consent.declined(cost.name)
