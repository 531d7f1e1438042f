"""`localq pull`: fetch models and verify them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from localq.cli import agree, help_page, options, progress
from localq.cli.output import note, print_json, print_line, stderr
from localq.errors import ExitCode, usage_error
from localq.files import catalog, gguf_choice
from localq.settings import OF_LOAD, Settings
from localq.wording import OnProgress, human_bytes

Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME",
        help="NAME, NAME@FORMAT, ORG/REPO or ORG/REPO:TAG.",
        autocompletion=options.complete_names,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="REVISION",
        help="Branch, tag or commit (default: from the catalogue).",
        rich_help_panel=help_page.ADVANCED,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Download even if the model is damaged or too large.", rich_help_panel=help_page.MODEL
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        "--estimate-only",
        help="Show the size and memory plan without downloading.",
        rich_help_panel=help_page.MODEL,
    ),
]


def pull(
    name: Names,
    revision: Revision = None,
    force: Force = False,
    dry_run: DryRun = False,
    vram: options.Vram = None,
    desktop: options.Desktop = None,
    offline: options.Offline = None,
    token: options.Token = None,
    yes: agree.Yes = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Download models and print where they are.

    Before the download, checks that the model fits on the GPU; afterwards, verifies the hashes. Interrupted
    downloads resume. Files are stored in the shared Hugging Face cache.
    """
    targets = [catalog.resolve(each) for each in name]  # a misspelt name fails before the first byte
    for target in targets:
        _check(target, revision)
    settings = options.load_settings(OF_LOAD, offline=offline, vram=vram, desktop=desktop)
    from localq.planner import gguf_list  # start-up cost: a wrong name fails without it

    with gguf_list.explain(targets, settings, "pull", revision):
        return _pull_all(name, targets, _PullOptions(settings, revision, force, dry_run, yes, quiet, json))


@dataclass(frozen=True)
class _PullOptions:
    """Options of `pull`, without the model names."""

    settings: Settings
    revision: str | None
    force: bool
    dry_run: bool
    yes: bool
    quiet: bool
    json: bool


def _pull_all(names: list[str], targets: list[catalog.Target], request: _PullOptions) -> int:
    settings, revision, force, quiet = request.settings, request.revision, request.force, request.quiet
    if revision is None:
        targets = [_choose_target(each, settings, quiet) for each in names]
    if request.dry_run:
        return _plans(targets, revision, settings, force, request.json)
    damaged = [each for each in targets if revision is None and _note_damage(each, quiet)]
    missing = [each for each in targets if revision is not None or each in damaged or _here(each) is None]
    for target in missing:
        _judge(target, revision, settings, force, quiet)
    agree.check(missing, settings, request.yes, revision=revision, again=damaged)
    fetched = []
    for target in targets:
        try:
            with progress.fetch_bar(target.name, quiet, announced=target in missing) as show:
                path, was_here = _pull(target, revision, settings.offline, quiet, show)
        except (KeyboardInterrupt, SystemExit):
            if stderr().isatty():
                note()  # the terminal wrote ^C
            note(f"{target.name}: stopped; run the same command to resume")
            raise
        was_here = was_here and target not in missing
        fetched.append(_fields(target, path, was_here))
        if not quiet:
            made = "downloaded and verified" if target.source is not None or target.repo is not None else "quantized"
            state = "already on this machine" if was_here else made
            note(f"{target.name}: {human_bytes(fetched[-1]['bytes'])}, {state}")
        if not request.json:
            print_line(str(path))
    if request.json:
        print_json({"models": fetched})
    return ExitCode.OK


def _plans(targets: list[catalog.Target], revision: str | None, settings: Settings, force: bool, json: bool) -> int:
    """Print what a pull would do; raise the first refusal at the end, as a pull would."""
    from localq.planner import pull_report  # start-up cost, as above

    plans = [pull_report.plan_pull(each, settings, revision, force=force) for each in targets]
    refusals = [each.refusal for each in plans if each.refusal is not None]
    if json:
        print_json({"models": [pull_report.to_dict(each) for each in plans]})
        return refusals[0].exit_code if refusals else ExitCode.OK
    for number, plan in enumerate(plans):
        print_line("\n".join(["", *pull_report.lines(plan)] if number else pull_report.lines(plan)))
    if refusals:
        raise refusals[0]
    return ExitCode.OK


def _check(target: catalog.Target, revision: str | None) -> None:
    if target.store:
        step = f"`localq chat {target.name}` uses it in place."
        raise usage_error(target.name, "this model is already on this machine, in another program's store", step)
    if target.path is not None:
        raise usage_error(target.name, "a local path needs no download", "Use a model name or ORG/REPO.")
    if revision is not None and (target.source is None or target.source.kind != "hub") and target.repo is None:
        raise usage_error("--revision", f"{target.name} does not come from the hub", "Remove the option.")


def _choose_target(name: str, settings: Settings, quiet: bool) -> catalog.Target:
    """The target that `localq chat` would load for this name."""
    from localq.planner import pull_report  # start-up cost: a wrong name fails without it

    target, why = pull_report.choose_target(name, settings)
    if why and not quiet:
        note(why)
    return target


def _here(target: catalog.Target) -> Path | None:
    from localq.files.hub import fetch as hub  # start-up cost, as above

    return hub.local_path(target)


def _note_damage(target: catalog.Target, quiet: bool) -> bool:
    """Note that `target`, quantized here, is damaged and will be quantized again; False where it is not."""
    from localq.planner import prepare  # start-up cost, as above

    with progress.fetch_bar(target.name, quiet) as show:
        error = prepare.damage(target, show)
    if error is not None and not quiet:
        note(f"{error.what}: {error.why}; localq quantizes it again")
    return error is not None


def _judge(target: catalog.Target, revision: str | None, settings: Settings, force: bool, quiet: bool) -> None:
    """Print whether `target` fits. Raises LocalqError (exit 3) where it does not."""
    from localq.files.hub import client as hub_client
    from localq.planner import pull_report  # start-up cost, as above

    from_hub = target.repo is not None or (target.source is not None and target.source.kind == "hub")
    if from_hub and (settings.offline or hub_client.is_offline()):
        return  # the fetch reports that it is missing
    verdict = pull_report.verdict(target, settings, revision, force=force)
    if verdict is not None and verdict.refusal is not None:
        raise verdict.refusal
    if verdict is not None and not quiet:
        note(verdict.text)


def _pull(
    target: catalog.Target, revision: str | None, offline: bool, quiet: bool, show: OnProgress
) -> tuple[Path, bool]:
    """The path, and whether every file was already here."""
    from localq.files.hub import fetch as hub
    from localq.planner import prepare  # start-up cost, as above

    was_here = True

    def count(what: str, done: int, total: int) -> None:
        nonlocal was_here
        was_here = was_here and not total  # a check of local files has no total
        show(what, done, total)

    if revision is None:
        return prepare.model_path(target, _say(quiet), count, offline, mend=True), was_here
    if target.source is not None:  # the catalogue's hashes are of its own revision
        source = dataclasses.replace(target.source, revision=revision, sha256={})
    else:
        source = hub.repo_source(target, revision)
    return hub.fetch(source, count, offline=offline, refresh=True), was_here


def _say(quiet: bool) -> Callable[[str], None]:
    def nothing(text: str) -> None:
        """-q: print nothing."""

    return nothing if quiet else note


def _fields(target: catalog.Target, path: Path, was_here: bool) -> dict[str, Any]:
    from localq.files.hub import cache as hub_cache

    files = [part.stat() for part in gguf_choice.parts_of(path)] if path.is_file() else hub_cache.content(path)
    size = sum(each.st_size for each in files)
    return {
        "name": target.name,
        "format": target.format,
        "path": str(path),
        "bytes": size,
        "fetched": not was_here,
    }
