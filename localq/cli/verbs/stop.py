"""`localq stop`: end servers of this user."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from localq.cli import options
from localq.cli.output import note, print_json
from localq.errors import ExitCode, LocalqError, usage_error

if TYPE_CHECKING:
    from localq.worker.messages import ServerStatus


def stop(
    name: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Models or process IDs from `localq ps`.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Stop all servers.")] = False,
    json: options.Json = False,
) -> int:
    """Stop servers and unload their models.

    Without NAME, stops the only server. Replies in progress get 10 seconds to finish.
    """
    from localq.cli.verbs.ps import statuses
    from localq.worker import shared  # start-up cost: `localq --help` does without it

    wanted = _wanted(statuses(), name or [], every)
    pids, slow = {each.pid for each in wanted}, []
    for engine in shared.servers() if pids else ():
        with contextlib.suppress(LocalqError, OSError):  # it is ending
            if (pid := engine.status().pid) in pids and not engine.stop():
                slow.append(pid)
    if slow:
        why = f"still running: {', '.join(map(str, slow))}"
        raise LocalqError("stop", why, f"Run `kill -9 {' '.join(map(str, slow))}`.")
    if json:
        print_json({"stopped": [{"model": each.model, "pid": each.pid} for each in wanted]})
    elif not wanted:
        note("no server is running")
    for each in wanted if not json else ():
        note(f"stopped {each.model} (process {each.pid})")
    return ExitCode.OK


def _wanted(running: list[ServerStatus], names: list[str], every: bool) -> list[ServerStatus]:
    """The servers to stop. Raises LocalqError: exit 4 for a name that no server has, 2 where the choice is open."""
    if every:
        return running
    if not names:
        if len(running) > 1:
            models = ", ".join(each.model for each in running)
            raise usage_error("stop", f"{len(running)} servers are running: {models}", "Name one, or use --all.")
        return running
    found = []
    for name in names:
        same = [each for each in running if name in (each.model, str(each.pid))]
        if not same:
            step = "To list the running servers, run `localq ps`."
            raise LocalqError(name, "no server has this model loaded", step, ExitCode.UNKNOWN_MODEL)
        found += [each for each in same if each not in found]
    return found
