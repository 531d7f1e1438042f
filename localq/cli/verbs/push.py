"""`localq push`: upload a model quantized here to the Hugging Face hub, with a model card."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq import places
from localq.cli import help_page, options, progress
from localq.cli.output import note, print_json, print_line, stderr
from localq.errors import ExitCode, LocalqError, usage_error
from localq.wording import human_bytes

if TYPE_CHECKING:
    from localq.files.publish.plan import PushPlan, PushRequest

MAX_MEASURED_BYTES = 2**20
_FOLDER = "Output folder of `localq quantize`, or a name from `localq ls`."
_LICENSE = "Licence of the source model, if localq does not know it or its terms."
_MEASURED = "Results for the model card: the output of `localq eval FOLDER --json`."


def push(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help=_FOLDER)],
    repo: Annotated[str, typer.Argument(metavar="ORG/REPO", help="Repository; created if it does not exist.")],
    private: Annotated[
        bool, typer.Option("--private", help="Create a private repository.", rich_help_panel=help_page.MODEL)
    ] = False,
    license: Annotated[
        str,
        typer.Option(
            "--license", "--licence", metavar="ID", help=_LICENSE, rich_help_panel=help_page.MODEL,
        ),
    ] = "",
    base: Annotated[
        str,
        typer.Option(
            "--base", metavar="ORG/REPO", help="Source model, if FOLDER does not record it.",
            rich_help_panel=help_page.MODEL,
        ),
    ] = "",
    measured: Annotated[
        Path | None,
        typer.Option("--measured", metavar="FILE", help=_MEASURED, rich_help_panel=help_page.MODEL),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Overwrite a different model in ORG/REPO.", rich_help_panel=help_page.MODEL
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show the files and the model card without uploading.", rich_help_panel=help_page.MODEL
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.", rich_help_panel=help_page.MODEL)
    ] = False,
    token: options.Token = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:  # fmt: skip
    """Upload a locally quantized model to Hugging Face.

    First checks the files and the source's licence, then writes a model card. Interrupted uploads resume: the same
    command sends what is missing. `localq chat ORG/REPO` then works anywhere.
    """
    from localq.files.publish.plan import PushRequest, check_names  # start-up cost: not for --help

    request = PushRequest(
        _find(folder), repo, base, license, _measurements(measured, folder), private, force, _is_offline(dry_run)
    )
    check_names(request)
    if not dry_run:
        _check_token(repo)
    with progress.fetch_bar(repo, quiet) as show:
        plan = _plan(request, show)
    if dry_run:
        return _show(plan, json)
    if plan.to_send or plan.removed:
        if not yes and not _confirm(plan):
            note("nothing uploaded")
            return ExitCode.FAILURE
        commit = _upload(plan, quiet)
    else:
        commit = plan.remote.commit
    _tell(plan, commit, quiet, json)
    return ExitCode.OK


def _find(folder: str) -> Path:
    """The folder of that path; else that of the model quantized here with this name."""
    path = places.expand(folder)
    named = places.quantized_dir() / folder
    return named if not path.exists() and "/" not in folder and named.is_dir() else path


def _is_offline(dry_run: bool) -> bool:
    """Return whether localq is offline. Raises LocalqError (exit 6) where an upload is wanted."""
    from localq.files.hub import client  # start-up cost, as above

    offline = options.load_settings(("offline",)).offline or client.is_offline()
    if offline and not dry_run:
        why = "localq is in offline mode"
        raise LocalqError("localq push", why, "Unset HF_HUB_OFFLINE, or use --dry-run.", ExitCode.NETWORK)
    return offline


def _check_token(repo: str) -> None:
    from localq.files.hub import client
    from localq.files.publish import errors  # start-up cost, as above

    if not client.has_token():
        raise errors.no_token(repo)


def _measurements(path: Path | None, folder: str) -> dict[str, str]:
    if path is None:
        return {}
    from localq.files import json_files
    from localq.files.publish import card  # start-up cost, as above

    result = json_files.read_object(path, MAX_MEASURED_BYTES)
    return card.measurements(result, _find(folder).absolute().name, f"--measured {path}")


def _plan(request: PushRequest, show: Any) -> PushPlan:
    from localq.files.publish import plan  # start-up cost, as above

    return plan.plan(request, show)


def _show(plan: PushPlan, json: bool) -> int:
    from localq.files.publish.plan import lines  # start-up cost, as above

    if json:
        print_json({**_fields(plan), "card": plan.card})
    else:
        print_line("\n".join([*lines(plan), "", plan.card.rstrip("\n")]))
    return ExitCode.OK


def _confirm(plan: PushPlan) -> bool:
    """Ask before anything is sent. Raises LocalqError (exit 2) without a terminal."""
    if not (sys.stdin.isatty() and stderr().isatty()):
        why = "cannot ask for confirmation without a terminal"
        raise usage_error("localq push", why, "Use --yes to skip the confirmation.")
    from localq.files.publish.plan import count, summary  # start-up cost, as above

    for line in summary(plan):
        note(line)
    kind = "private" if plan.private else "public"
    sent = f"{human_bytes(plan.send_bytes)} in {count(len(plan.to_send))}"
    return typer.confirm(f"Upload {sent} to {plan.request.repo} ({kind})?", err=True)


def _upload(plan: PushPlan, quiet: bool) -> str:
    from localq.files.publish import upload  # start-up cost, as above

    repo = plan.request.repo
    try:
        with progress.fetch_bar(repo, quiet, announced=True, verb="uploading") as show:
            return upload.push(plan, show)
    except (KeyboardInterrupt, SystemExit):
        if stderr().isatty():
            note()  # the terminal wrote ^C
        note(f"{repo}: stopped; run the same command to resume")
        raise


def _tell(plan: PushPlan, commit: str, quiet: bool, json: bool) -> None:
    """Print where the model is, and how it is used."""
    from localq.files.hub.errors import endpoint  # start-up cost, as above

    repo, address = plan.request.repo, f"{endpoint()}/{plan.request.repo}"
    if json:
        from localq.files.publish.plan import catalogue_source

        table = catalogue_source(plan, commit)
        print_json({**_fields(plan), "address": address, "commit": commit, "catalogue": table})
        return
    if not quiet:
        sent = f"{human_bytes(plan.send_bytes)} uploaded" if plan.to_send else "already complete"
        note(f"{repo}: {sent}. To chat, run `localq chat {repo}`.")
    print_line(address)


def _fields(plan: PushPlan) -> dict[str, Any]:
    new = {each.name for each in plan.to_send}
    files = [{"name": each.name, "bytes": each.size, "send": each.name in new} for each in plan.files]
    return {
        "repo": plan.request.repo,
        "private": plan.private,
        "base": plan.base,
        "licence": plan.licence,
        "format": plan.model.format,
        "scheme": plan.model.scheme,
        "bits_per_weight": plan.model.bits,
        "weights_bytes": plan.model.weights_bytes,
        "send_bytes": plan.send_bytes,
        "files": files,
        "replaced": list(plan.replaced),
        "removed": list(plan.removed),
    }
