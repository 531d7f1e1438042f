"""`localq prune`: remove unused files that localq fetched or wrote."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq.cli import options
from localq.cli.output import note, print_json, stderr
from localq.errors import ExitCode, LocalqError, usage_error
from localq.wording import human_bytes

if TYPE_CHECKING:
    from localq.chat.history.snapshot_files import UnusedFile
    from localq.files.hub.leftovers import Leftover
    from localq.files.scratch import Scrap


def prune(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed without removing it.")] = False,
    json: options.Json = False,
) -> int:
    """Delete partial downloads and unused files.

    Removes only files that localq downloaded or wrote; active downloads and other tools' files are left alone.
    """
    from localq.chat.history import snapshot_keeper  # start-up cost: only this verb looks for them
    from localq.files import scratch
    from localq.files.hub import leftovers as hub_leftovers

    unreadable: list[LocalqError] = []
    found: list[Leftover | UnusedFile | Scrap] = [
        *hub_leftovers.find(unreadable.append),
        *snapshot_keeper.unused_snapshots(options.load_settings()),
        *scratch.find(),
    ]
    for error in unreadable:
        note(str(error))
    for each in found:
        note(f"{human_bytes(each.bytes)}  {each.what}{f' of {each.repo}' if each.repo else ''}  {each.path}")
    total = sum(each.bytes for each in found)
    if dry_run or not found:
        note(f"{human_bytes(total)} could be freed" if found else "nothing to remove")
        freed, found = 0, found if dry_run else []
    elif yes or _confirm(total):
        freed = sum(map(_free, found))
        found = [each for each in found if not each.path.exists()]  # one that is in use again stays
        note(f"{human_bytes(freed)} freed")
    else:
        note("nothing removed")
        return ExitCode.FAILURE
    if json:
        from localq.cli.verbs.ls import unreadable_fields

        body = {"removed": [_fields(each) for each in found], "freed_bytes": freed, "dry_run": dry_run}
        print_json({**body, "unreadable": [unreadable_fields(each) for each in unreadable]})
    return ExitCode.OK


def _free(leftover: Leftover | UnusedFile | Scrap) -> int:
    from localq.chat.history import snapshot_files  # start-up cost, as above
    from localq.files import scratch
    from localq.files.hub import leftovers as hub_leftovers

    if isinstance(leftover, scratch.Scrap):
        return leftover.remove()
    if isinstance(leftover, snapshot_files.UnusedFile):
        return snapshot_files.free(leftover)
    return hub_leftovers.remove(leftover)


def _confirm(total: int) -> bool:
    if not (sys.stdin.isatty() and stderr().isatty()):
        raise usage_error(
            "localq prune",
            "cannot ask for confirmation without a terminal",
            "Use --yes to skip the confirmation.",
        )
    return typer.confirm(f"Delete all of these files ({human_bytes(total)})?", err=True)


def _fields(leftover: Leftover | UnusedFile | Scrap) -> dict[str, Any]:
    return {
        "path": str(leftover.path),
        "bytes": leftover.bytes,
        "what": leftover.what,
        "repo": leftover.repo or None,
    }
