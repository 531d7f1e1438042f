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
from localq.cli.output import is_rich_terminal, note, print_json, stderr_console
from localq.cli.verbs import quantize_bcq, quantize_calibrated
from localq.cli.verbs.quantize_calibrated import WEIGHED_WINDOWS, Calibrated
from localq.errors import usage_error
from localq.planner import budget
from localq.settings import Settings
from localq.wording import human_bytes

if TYPE_CHECKING:
    from localq.files.hub.shards import Shards
    from localq.files.model_folder import ModelFiles
    from localq.quantize.calibration import Texts
    from localq.quantize.model.input_moments import Text
    from localq.quantize.prequantized_layers import ReadyLayers

OnProgress = Callable[[str, int, int], None]

_KEEP = "Fetch all of SOURCE first, into the Hugging Face cache; else vq2 and aqlm2x8 fetch two files at a time."


def quantize(
    source: Annotated[
        str, typer.Argument(help="A name, ORG/REPO, a folder or a .gguf file.", autocompletion=options.known_names)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write; made if need be.")],
    format: Annotated[str, typer.Option("--format", "-f", help="nf4, bcq, mxfp4, squeezellm, vq2 or aqlm2x8.")] = "nf4",
    bits: quantize_calibrated.Bits = None,
    group: quantize_bcq.Group = None,
    zero_points: quantize_bcq.ZeroPoints = None,
    calibration: quantize_calibrated.Calibration = None,
    windows: quantize_calibrated.Windows = None,
    best: quantize_calibrated.Best = False,
    quick: quantize_calibrated.Quick = False,
    device: options.Device = None,
    seed: quantize_calibrated.Seed = None,
    vram: options.Vram = None,
    layers: quantize_calibrated.Layers = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the model that is in --out.")] = False,
    keep: Annotated[bool, typer.Option("--keep-source", help=_KEEP)] = False,
    offline: options.Offline = None,
    token: options.Token = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Quantize SOURCE into a model folder; run it again after an interruption, and it goes on.

    nf4 and mxfp4 take seconds to minutes. bcq (1 to 5 planes of signs: --bits, --group, --zero-points) and squeezellm
    (4 bits, every row with 16 values of its own) weigh on a text what errors cost: --calibration, --windows, --device.
    vq2 (2 to 4 bits) and aqlm2x8 (the same search, for other programs) are fitted to what the model does on a text:
    --bits, --calibration, --windows, --best, --device, --seed, --vram and --layers are theirs.
    """
    mix = quantize_bcq.mixture(format, bits, group, zero_points)
    scheme = quantize_bcq.scheme(format, bits, group, zero_points) if mix is None else ""
    texts = tuple(calibration or ()) or None
    wish = quantize_calibrated.wants_best(best, quick)
    asked = Calibrated(None if scheme or mix else bits, texts, windows, wish, device, seed, vram, layers)
    settings = options.effective(offline=offline, device=device, vram=vram)
    job = _Job(source, format, out, force, quiet, settings, keep, scheme, mix)
    folder = job.run(asked)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if json:
        print_json({"path": str(folder), "format": format, "weights_bytes": weights})
    else:
        job.say(f"{folder}: {human_bytes(weights)} of weights. Chat with it: localq chat {folder}")


@dataclass(frozen=True)
class _Job:
    """What to make of what, and where."""

    source: str
    format: str
    out: Path
    force: bool
    quiet: bool
    settings: Settings
    keep_source: bool
    scheme: str = ""
    mix: float | None = None  # bits per weight of a mixture of bcq

    def say(self, line: str) -> None:
        """A line for the user."""
        if not self.quiet:
            note(line)

    def run(self, asked: Calibrated) -> Path:
        """The folder. What was asked for is checked before anything is fetched."""
        from localq.files.model_folder import open_model  # start-up cost: --help must not pay for these
        from localq.planner import prepare
        from localq.quantize import calibration

        formats = ("nf4", "mxfp4", *prepare.WEIGHED, *prepare.CALIBRATED)
        if self.format not in formats:
            raise usage_error(self.format, "localq does not write this format", f"Formats: {', '.join(formats)}.")
        asked.check(self.format, prepare.CALIBRATED, self.mix is not None)
        ready = None
        if asked.layers is None:
            prepare.check_can_make(self.format, self.source)
        else:
            from localq.quantize import prequantized_layers

            ready = prequantized_layers.open_ready(asked.layers)
        on_text = self.format in prepare.CALIBRATED
        weighed = self.format in prepare.WEIGHED and not asked.without_text
        text = calibration.read_texts(asked.texts) if on_text or weighed else ()
        if on_text and not self.keep_source and (shards := self._remote()):
            return self._from_hub(shards, text, asked, ready)
        with _progress(self.quiet) as on_progress:
            files = open_model(prepare.source_path(self.source, self.say, on_progress, self.settings.offline))
            if not on_text:
                return self._converted(files, self._weighing(files, text, asked) if weighed else None, on_progress)
        if ready is not None and not asked.best:
            return self._around(files, ready)
        return self._on_text(files, text, asked, ready)

    def _converted(self, files: ModelFiles, weighing: Text | None, on_progress: OnProgress | None) -> Path:
        """Each matrix by itself, in one pass over the weights."""
        from localq.quantize import by_tensor  # torch loads only now
        from localq.quantize.bits import binary_mixture

        wish = None if weighing is None or self.mix is None else binary_mixture.Wish(self.mix, weighing)
        return by_tensor.convert(
            files,
            self.format,
            self.out,
            on_progress,
            self.say,
            force=self.force,
            text=weighing if wish is None else None,
            scheme=self.scheme,
            wish=wish,
        )

    def _weighing(self, files: ModelFiles, text: Texts, asked: Calibrated) -> Text | None:
        """The text on which columns, or errors, of matrices are weighed, and where; None for a mixture of experts of
        which nobody has asked for that."""
        from localq.engine.load.device import device_name, pick
        from localq.files import catalog
        from localq.files.architecture import Architecture
        from localq.quantize import calibration
        from localq.quantize.model.input_moments import Text

        if asked.is_bare and self.mix is None and Architecture.from_config(files.config).experts:
            self.say(f"{files.name}: {catalog.NO_WEIGHING_OF_EXPERTS}, so each matrix is made by itself.")
            return None
        choice = pick(self.settings.device)
        ids = calibration.token_windows(files, text, asked.windows, WEIGHED_WINDOWS)
        for line in choice.notes:
            self.say(line)
        counted = f"{len(ids)} window{'s' * (len(ids) > 1)} of {len(ids[0])} tokens"
        where = device_name(choice.device)
        what = "errors" if self.format == quantize_bcq.FORMAT else "columns"
        if self.mix is None:
            self.say(f"{files.name}: {what} count as on {counted}, on {where}; --calibration none: all alike.")
        else:
            self.say(f"{files.name}: {what} count, and bits are worth, what they are on {counted}, on {where}.")
        return Text(ids, choice.device)

    def _around(self, files: ModelFiles, ready: ReadyLayers, shards: Shards | None = None) -> Path:
        """Embedding and head around layers that were made before."""
        import torch

        from localq.cli import progress as progress_lines
        from localq.quantize import by_layer, prequantized_layers

        prequantized_layers.check(ready, files, shards)
        cpu = torch.device("cpu")  # seconds of work, and the same bytes everywhere
        request = by_layer.Request(
            files, self.out, (), cpu, seed=ready.seed, force=self.force, shards=shards, layers=ready
        )
        with progress_lines.quantize_bar(self.quiet) as on_progress:
            return by_layer.convert(request, on_progress, self.say)

    def _remote(self) -> Shards | None:
        """The weights file by file, where the hub has them and this machine does not."""
        from localq.files.hub import shards as hub_shards
        from localq.planner import prepare

        source = prepare.remote_source(self.source, self.settings.offline)
        if not self.out.absolute().name:
            raise usage_error("--out", f"{self.out} has no name of its own", "Give a folder in it.")
        cache = self.out.absolute().with_name(f"{self.out.absolute().name}.source")
        return None if source is None else hub_shards.open_shards(source, cache)

    def _from_hub(self, shards: Shards, text: Texts, asked: Calibrated, ready: ReadyLayers | None) -> Path:
        from localq.files.model_folder import open_model
        from localq.quantize.output.shards import load_state

        self.say(f"{self.source}: fetched while it is quantized, and not kept (--keep-source keeps it).")
        try:
            files = open_model(shards.folder, weights=False)
            if ready is not None and not asked.best:
                return self._around(files, ready, shards)
            return self._on_text(files, text, asked, ready, shards)
        finally:
            shards.close(done=load_state(self.out) is None)  # finished, or never begun

    def _on_text(
        self, files: ModelFiles, text: Texts, asked: Calibrated, ready: ReadyLayers | None, shards: Shards | None = None
    ) -> Path:
        """Layers made on a text, or those that are `ready` trained on it."""
        from localq.cli import progress as progress_lines
        from localq.engine.load.device import device_name, pick
        from localq.quantize import by_layer, calibration, prequantized_layers

        if ready is not None:
            prequantized_layers.check(ready, files, shards)
        choice, best = pick(self.settings.device), bool(asked.best)
        hard, tuning = quantize_calibrated.effort(best=best and ready is None)
        ids = calibration.token_windows(files, text, asked.windows, None if best else quantize_calibrated.QUICK_WINDOWS)
        paths = f", {hard.beam} paths a row" if ready is None else ""
        counted = f"{len(ids)} window{'s' * (len(ids) > 1)} of {len(ids[0])} tokens{paths}"
        where = device_name(choice.device)
        request = by_layer.Request(
            files,
            self.out,
            ids,
            choice.device,
            format=self.format,
            scheme=asked.scheme,
            bits=asked.mixed,
            effort=hard,
            tuning=tuning,
            whole=quantize_calibrated.together(len(ids), best=best),
            seed=(asked.seed or 0) if ready is None else ready.seed,
            vram_bytes=budget.allowed(self.settings),
            force=self.force,
            shards=shards,
            layers=ready,
            begun=f"{files.name}: {counted}, on {where}. Once interrupted, the same command goes on.",
        )
        idle = ("--vram has no meaning on the CPU",) if request.vram_bytes and choice.device.type == "cpu" else ()
        for line in (*choice.notes, *idle):
            self.say(line)
        with progress_lines.quantize_bar(self.quiet) as on_progress:
            return by_layer.convert(request, on_progress, self.say)


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
