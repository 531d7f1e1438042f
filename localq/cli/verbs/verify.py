"""`localq verify`: check the files of models on this machine against their recorded hashes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq.cli import options
from localq.cli.output import is_rich_terminal, note, print_json, stderr, stderr_console, stdout_table
from localq.errors import ExitCode, LocalqError
from localq.wording import human_bytes

if TYPE_CHECKING:
    from localq.files.checked_files import OnFile
    from localq.files.local_models import LocalModel
    from localq.files.verification import CheckedFile

Names = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="Names from `localq ls` (default: all localq models).")
]


def verify(name: Names = None, quiet: options.Quiet = False, json: options.Json = False) -> int:
    """Check model files against their recorded hashes.

    Reads every file that has a recorded hash, and changes nothing. For a damaged model, prints the command that repairs
    it. Without NAME, unreadable models are reported and skipped; ollama and LM Studio models are not checked.
    """
    from localq.cli.verbs.ls import unreadable_fields
    from localq.files import local_models, packaged_model, verification  # start-up cost: only this verb hashes

    unreadable: list[LocalqError] = []
    if name:
        models = list({str(model.path): model for word in name for model in local_models.matching(word)}.values())
    else:
        here = local_models.inventory(others=False)
        models, unreadable = here.models, [closed.error for closed in here.unreadable]
    if not models and not unreadable:
        note(
            "no models yet; to download one, run `localq pull NAME`; "
            f"the small model smollm2-135m {packaged_model.BUILT_IN}"
        )
    found = []
    with _progress(models, quiet) as on_file:
        for model in models:
            try:
                found.append((model, verification.check(model, on_file)))
            except LocalqError as error:
                if name:
                    raise
                unreadable.append(error)  # in a cache that users share it is one of many
    if json:
        fields = [_fields(model, checked) for model, checked in found]
        print_json({"models": fields, "unreadable": [unreadable_fields(each) for each in unreadable]})
    else:
        _print(found)
        for each in unreadable:
            note(str(each))
    good = all(verification.repair(model, checked) is None for model, checked in found)
    return ExitCode.OK if good else ExitCode.BAD_FILE


def _print(found: list[tuple[LocalModel, list[CheckedFile]]]) -> None:
    from localq.files.verification import UNRECORDED, repair

    rows, messages = [], []
    for model, checked in found:
        bad = [each for each in checked if each.state not in ("right", UNRECORDED)]
        unknown = [each for each in checked if each.state == UNRECORDED]
        command = repair(model, checked)
        state = "right" if command is None else "damaged" if bad else "incomplete"
        if command is None and len(unknown) == len(checked):
            state = "no recorded hashes"
        rows.append([model.name, state, str(len(checked)), human_bytes(sum(each.bytes for each in checked))])
        messages += [f"{model.name}: {each.path} is {each.state}" for each in bad]
        messages += [f"{model.name}: run `{command}` to repair it"] if command else []
    if rows:
        stdout_table(["NAME", "STATE", "FILES", "SIZE"], rows, right=frozenset({2, 3}))
    for line in messages:
        note(line)


def _fields(model: LocalModel, checked: list[CheckedFile]) -> dict[str, Any]:
    from localq.files.verification import repair

    files = [{"path": str(each.path), "bytes": each.bytes, "state": each.state} for each in checked]
    command = repair(model, checked)
    return {"name": model.name, "right": command is None, "repair": command, "files": files}


@contextlib.contextmanager
def _progress(models: list[LocalModel], quiet: bool) -> Iterator[OnFile]:
    """A progress bar at a terminal, nothing elsewhere."""
    if quiet or not is_rich_terminal(stderr()):
        yield lambda what, size: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    text = TextColumn("checking {task.description}", markup=False)
    columns = (text, BarColumn(20), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=stderr_console(), transient=True) as bar:
        task, before = bar.add_task("", total=sum(model.bytes for model in models)), 0

        def on_file(what: str, size: int) -> None:
            nonlocal before
            bar.update(task, description=what, advance=before)
            before = size

        yield on_file
