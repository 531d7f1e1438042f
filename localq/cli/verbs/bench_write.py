"""`localq bench --synthetic NAME --write FOLDER`: random weights as a model folder, with a real tokenizer."""

from __future__ import annotations

from typing import Annotated

import typer

from localq import places
from localq.cli import help_page, progress
from localq.cli.output import note, print_json, print_line
from localq.errors import usage_error
from localq.settings import Settings
from localq.wording import human_bytes

_WRITE = "Write the --synthetic model to FOLDER and exit."
Write = Annotated[
    str | None,
    typer.Option("--write", metavar="FOLDER", help=_WRITE, show_default=False, rich_help_panel=help_page.MODES),
]


def run(name: str | None, folder: str, settings: Settings, seed: int, quiet: bool, *, as_json: bool) -> None:
    """Write the folder. Raises LocalqError: exit 2 without a name, and those of `writer.write`."""
    if name is None:
        raise usage_error("--write", "no model given", "Specify a catalogue name, such as llama-3.1-8b.")
    from localq.bench.synthetic import checkpoint, writer  # torch loads only now
    from localq.engine.load import device
    from localq.files.model_folder import open_model
    from localq.planner import prepare

    files, format = checkpoint.files_of(name)
    text = open_model(prepare.source_path(Settings().model, note, None, settings.offline))
    out = places.expand(folder, "--write")
    with progress.quantize_bar(quiet) as show:
        on_progress = show or (lambda stage, done, total: None)
        size = writer.write(files, format, out, text, device.pick(settings.device).device, seed, on_progress)
    if as_json:
        print_json({"folder": str(out), "model": files.name, "bytes": size})
        return
    print_line(f"{out}: {files.name}, {human_bytes(size)}; tokenizer and chat template from {text.name}")
