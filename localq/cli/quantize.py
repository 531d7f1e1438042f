"""`localq quantize`: full-precision weights to a quantized model folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from localq.cli import options
from localq.cli.output import human_bytes, is_rich_terminal, note, print_json, stderr_console

OnProgress = Callable[[str, int, int], None]


def quantize(
    source: Annotated[
        str, typer.Argument(help="A name, ORG/REPO, a folder or a .gguf file.", autocompletion=options.known_names)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write; made if need be.")],
    format: Annotated[str, typer.Option("--format", "-f", help="Format to write.")] = "nf4",
    force: Annotated[bool, typer.Option("--force", help="Replace the model that is in --out.")] = False,
    offline: options.Offline = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Quantize SOURCE into a model folder; run it again after an interruption, and it goes on."""
    from localq import convert, prepare  # convert loads torch
    from localq.modelfiles import open_model

    def say(line: str) -> None:
        if not quiet:
            note(line)

    effective = options.effective(offline=offline)
    with _progress(quiet) as on_progress:
        files = open_model(prepare.source_path(source, say, on_progress, effective.offline))
        folder = convert.convert(files, format, out, on_progress, say, force=force)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if json:
        print_json({"path": str(folder), "format": format, "weights_bytes": weights})
    else:
        say(f"{folder}: {human_bytes(weights)} of weights. Chat with it: localq chat {folder}")


@contextmanager
def _progress(quiet: bool) -> Iterator[OnProgress | None]:
    """A progress bar on stderr, where that is a terminal."""
    if quiet or not is_rich_terminal(sys.stderr):
        yield None
        return
    from rich import progress  # rich costs start-up time

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=stderr_console(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield update
