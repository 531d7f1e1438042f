"""`localq rm`: remove models from this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from localq.cli import options
from localq.cli.output import note, print_json, stderr
from localq.errors import ExitCode, usage_error
from localq.wording import human_bytes

if TYPE_CHECKING:
    from localq.files.local_models import LocalModel


def rm(
    name: Annotated[list[str], typer.Argument(metavar="NAME", help="Names from `localq ls`.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    json: options.Json = False,
) -> int:
    """Delete models from this machine.

    Models that belong to ollama or LM Studio are not deleted; use those programs to delete them.
    """
    from localq.cli.verbs.ls import fields
    from localq.files import local_models, removal  # start-up cost: `localq --help` does without it

    found = {str(model.path): model for each in name for model in local_models.matching(each)}
    models = list(found.values())
    removal.refuse_foreign(models)
    if not yes and not _confirm(models):
        note("nothing removed")
        return ExitCode.FAILURE
    freed = 0
    for model in models:
        paths = ", ".join(removal.paths_of(model))
        freed += removal.remove([model])
        note(f"removed {model.name} ({paths})")
    if json:
        print_json({"removed": [fields(model) for model in models], "freed_bytes": freed})
    else:
        note(f"{human_bytes(freed)} freed")
    return ExitCode.OK


def _confirm(models: list[LocalModel]) -> bool:
    if not (sys.stdin.isatty() and stderr().isatty()):
        raise usage_error(
            "localq rm", "cannot ask for confirmation without a terminal", "Use --yes to skip the confirmation."
        )
    from localq.files.removal import bytes_freed, paths_of

    for model in models:
        note(f"{model.name}  {model.format}  {human_bytes(bytes_freed(model))}  {', '.join(paths_of(model))}")
    total = human_bytes(sum(map(bytes_freed, models)))
    which = "this model" if len(models) == 1 else f"these {len(models)} models"
    return typer.confirm(f"Delete {which} ({total})?", err=True)
