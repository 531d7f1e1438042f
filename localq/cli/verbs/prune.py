"""`localq prune`: free the disk of what localq fetched or wrote and nothing uses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq.cli import options
from localq.cli.output import note, print_json
from localq.errors import ExitCode, usage_error
from localq.wording import human_bytes

if TYPE_CHECKING:
    from localq.chat.history.snapshot_files import Unused
    from localq.files.hub.leftovers import Leftover


def prune(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    json: options.Json = False,
) -> int:
    """Remove downloads that were cut off, and files that no model or conversation uses.

    Only what localq itself fetched or wrote, and nothing that is being fetched now; other tools' files stay.
    """
    from localq.chat.history import snapshot_files, snapshot_keeper  # start-up cost: only this verb looks for them
    from localq.files.hub import leftovers as hub_leftovers

    found: list[Leftover | Unused] = [*hub_leftovers.find(), *snapshot_keeper.unused(options.effective())]
    for each in found:
        note(f"{human_bytes(each.bytes)}  {each.what}{f' of {each.repo}' if each.repo else ''}  {each.path}")
    total = sum(each.bytes for each in found)
    if dry_run or not found:
        note(f"{human_bytes(total)} could be freed" if found else "there is nothing to remove")
        freed, found = 0, found if dry_run else []
    elif yes or _confirmed(total):
        freed = sum(
            snapshot_files.free(each) if isinstance(each, snapshot_files.Unused) else hub_leftovers.remove(each)
            for each in found
        )
        found = [each for each in found if not each.path.exists()]  # what is used by now stayed
        note(f"{human_bytes(freed)} freed")
    else:
        note("nothing was removed")
        return ExitCode.FAILURE
    if json:
        print_json({"removed": [_fields(each) for each in found], "freed_bytes": freed, "dry_run": dry_run})
    return ExitCode.OK


def _confirmed(total: int) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise usage_error("localq prune", "there is no terminal to ask at", "Give -y to remove without a question.")
    return typer.confirm(f"Remove all of this ({human_bytes(total)})?", err=True)


def _fields(leftover: Leftover | Unused) -> dict[str, Any]:
    return {
        "path": str(leftover.path),
        "bytes": leftover.bytes,
        "what": leftover.what,
        "repo": leftover.repo or None,
    }
