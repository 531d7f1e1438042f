"""`localq quantize`: full-precision weights to a quantized model folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localq.cli import options
from localq.cli.output import human_bytes, is_rich_terminal, note, print_json, stderr_console
from localq.errors import usage_error

if TYPE_CHECKING:
    from localq.modelfiles import ModelFiles

OnProgress = Callable[[str, int, int], None]
Say = Callable[[str], None]

SCHEMES = {"2": "s4l16", "2.5": "s4l16+s16l16", "3": "s4l16+s8l16", "4": "s4l16+s4l16"}  # of vq2, by bits
QUICK_WINDOWS = 64
BEST_BEAM, BEST_ROUNDS = 64, 2
BEST_STEPS, BEST_SEQUENCES = 200, 4  # of fine-tuning
LARGEST_SEED = 2**31 - 1


@dataclass(frozen=True)
class _Calibrated:
    """What was asked of a format that is made on a text; None where nothing was."""

    bits: str | None
    calibration: Path | None
    windows: int | None
    best: bool | None
    device: str | None
    seed: int | None

    def check(self, format: str, calibrated: tuple[str, ...]) -> None:
        """Raises LocalqError (exit 2) for options that `format` does not have, and for bits that there are not."""
        given = {f"--{name}": value for name, value in vars(self).items() if value is not None}
        if "--best" in given and not self.best:
            given = {"--quick" if name == "--best" else name: value for name, value in given.items()}
        if format not in calibrated and given:
            why = f"{format} is made without a text, the same on every machine"
            raise usage_error(next(iter(given)), why, f"It is an option of --format {' and '.join(calibrated)}.")
        if self.bits is not None and format != "vq2":
            raise usage_error("--bits", f"{format} has bits of its own", "It is an option of --format vq2.")
        if self.bits is not None and self.bits not in SCHEMES:
            raise usage_error("--bits", f"{self.bits!r} is not offered", f"There are {', '.join(SCHEMES)}.")


def quantize(
    source: Annotated[
        str, typer.Argument(help="A name, ORG/REPO, a folder or a .gguf file.", autocompletion=options.known_names)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write; made if need be.")],
    format: Annotated[str, typer.Option("--format", "-f", help="nf4, vq2 or aqlm2x8.")] = "nf4",
    bits: Annotated[str | None, typer.Option("--bits", help="Of vq2: 2 (default), 2.5, 3 or 4.")] = None,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", metavar="FILE", help="A plain text, unlike the one to judge by.")
    ] = None,
    windows: Annotated[
        int | None, typer.Option("--windows", min=1, help="How many of its windows of 2048 tokens.")
    ] = None,
    best: Annotated[
        bool | None,
        typer.Option(
            "--best/--quick", help="A wider search, twice, on all of the text, and fine-tuning: hours without a GPU.",
            show_default=False,
        ),
    ] = None,
    device: options.Device = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Of the rotations of vq2 and aqlm2x8.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the model that is in --out.")] = False,
    offline: options.Offline = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:  # fmt: skip
    """Quantize SOURCE into a model folder; run it again after an interruption, and it goes on.

    nf4 takes seconds to minutes. vq2 (2 to 4 bits) and aqlm2x8 (the same search, for other programs) are fitted to
    what the model does on a text: --bits, --calibration, --windows, --best, --device and --seed are theirs.
    """
    from localq import prepare
    from localq.modelfiles import open_model  # start-up cost: --help must not pay for these

    def say(line: str) -> None:
        if not quiet:
            note(line)

    asked = _Calibrated(bits, calibration, windows, best, device, seed)
    formats = ("nf4", *prepare.CALIBRATED)
    if format not in formats:
        raise usage_error(format, "localq does not write this format", f"Formats: {', '.join(formats)}.")
    asked.check(format, prepare.CALIBRATED)
    prepare.check_can_make(format)
    text = None if format not in prepare.CALIBRATED else _text(asked)
    effective = options.effective(offline=offline, device=device)
    with _progress(quiet) as on_progress:
        files = open_model(prepare.source_path(source, say, on_progress, effective.offline))
        if text is None:
            from localq import convert  # torch loads only now

            folder = convert.convert(files, format, out, on_progress, say, force=force)
    if text is not None:
        folder = _on_text(files, format, out, text, asked, effective.device, force, quiet, say)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if json:
        print_json({"path": str(folder), "format": format, "weights_bytes": weights})
    else:
        say(f"{folder}: {human_bytes(weights)} of weights. Chat with it: localq chat {folder}")


def _text(asked: _Calibrated) -> str:
    from localq import calibration

    return calibration.read_text(asked.calibration or calibration.DEFAULT_TEXT)


def _on_text(
    files: ModelFiles, format: str, out: Path, text: str, asked: _Calibrated, device: str, force: bool, quiet: bool,
    say: Say,
) -> Path:  # fmt: skip
    """The folder of a model that was fitted to `text`."""
    from localq import calibration, vq_convert
    from localq.cli import quantize_progress
    from localq.engine.device import device_name, pick
    from localq.quantizer.encode import Effort
    from localq.quantizer.finetune import Tuning

    choice = pick(device)
    effort = Effort(beam=BEST_BEAM, rounds=BEST_ROUNDS) if asked.best else Effort()
    tuning = Tuning(BEST_STEPS, BEST_SEQUENCES) if asked.best else Tuning()
    ids = calibration.token_windows(files, text, asked.windows, None if asked.best else QUICK_WINDOWS)
    scheme, seed = SCHEMES[asked.bits or "2"], asked.seed or 0
    request = vq_convert.Request(
        files,
        out,
        ids,
        choice.device,
        format=format,
        scheme=scheme,
        effort=effort,
        tuning=tuning,
        seed=seed,
        force=force,
    )
    for line in choice.notes:
        say(line)
    counted = f"{len(ids)} window{'s' * (len(ids) > 1)} of {len(ids[0])} tokens, {effort.beam} paths a row"
    say(f"{files.name}: {counted}, on {device_name(choice.device)}. Once interrupted, the same command goes on.")
    with quantize_progress.shown(quiet) as on_progress:
        return vq_convert.convert(request, on_progress, say)


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
