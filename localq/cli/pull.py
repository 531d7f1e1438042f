"""`localq pull`: fetch models before they are needed."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from localq import catalog
from localq.cli import options
from localq.cli.output import human_bytes, is_rich_terminal, note, print_json, stderr_console
from localq.errors import usage_error

OnProgress = Callable[[str, int, int], None]


def pull(
    name: Annotated[
        list[str], typer.Argument(help="Names, NAME@FORMAT or ORG/REPO.", autocompletion=options.known_names)
    ],
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit instead of the catalogue's; asks the hub.")
    ] = None,
    offline: options.Offline = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Fetch models and verify them; prints where each one is."""
    targets = [catalog.resolve(each) for each in name]  # a misspelt name stops before the first byte
    for target in targets:
        _check(target, revision)
    no_network = options.effective(offline=offline).offline
    fetched = []
    for target in targets:
        path, was_here = _pull(target, revision, no_network, quiet)
        fetched.append(_fields(target, path, was_here))
        if not quiet:
            size = human_bytes(fetched[-1]["bytes"])
            note(f"{target.name}: {size}, {'already on this machine' if was_here else 'fetched and verified'}")
        if not json:
            print(path, flush=True)
    if json:
        print_json({"models": fetched})


def _check(target: catalog.Target, revision: str | None) -> None:
    if target.path is not None:
        raise usage_error(target.name, "this is a path, there is nothing to fetch", "Give a name or ORG/REPO.")
    if revision is not None and (target.source is None or target.source.kind != "hub") and target.repo is None:
        raise usage_error("--revision", f"{target.name} does not come from the hub", "Leave the option out.")


def _pull(target: catalog.Target, revision: str | None, offline: bool, quiet: bool) -> tuple[Path, bool]:
    """(path, it was here already)."""
    from localq import hub, prepare  # start-up cost: a wrong name must be answered without these

    here = hub.local_path(target) if revision is None else None
    if here is not None:
        return here, True
    reason = catalog.not_yet(target.entry.arch, target.format or "") if target.entry else None
    if reason and not quiet:
        note(f"{target.name}: {reason}; it is fetched all the same")
    with _progress(target.name, quiet) as on_progress:
        if revision is None:
            return prepare.model_path(target, _say(quiet), on_progress, offline), False
        if target.source is not None:  # the catalogue's hashes are of its own revision
            source = dataclasses.replace(target.source, revision=revision, sha256={})
            return hub.fetch(source, on_progress, offline=offline, refresh=True), False
        assert target.repo is not None, "checked by _check"
        return hub.fetch_repo(target.repo, revision, on_progress, offline=offline, refresh=True), False


def _say(quiet: bool) -> Callable[[str], None]:
    def nothing(text: str) -> None:
        """-q asks for silence."""

    return nothing if quiet else note


@contextlib.contextmanager
def _progress(name: str, quiet: bool) -> Iterator[OnProgress | None]:
    """A bar on a terminal; elsewhere one line, and nothing with -q."""
    if quiet:
        yield None
        return
    if not is_rich_terminal(sys.stderr):
        note(f"fetching {name}")
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(20), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr_console(), transient=True) as bar:
        task = bar.add_task(name, total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield show


def _fields(target: catalog.Target, path: Path, was_here: bool) -> dict[str, Any]:
    from localq import hub_cache

    size = path.stat().st_size if path.is_file() else sum(each.st_size for each in hub_cache.content(path))
    return {
        "name": target.name,
        "format": target.format,
        "path": str(path),
        "bytes": size,
        "fetched": not was_here,
    }
