"""`localq quantize`: turn full-precision weights into a quantized model folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localq import processes
from localq.cli import agree, help_page, options
from localq.cli.output import is_rich_terminal, note, print_json, stderr, stderr_console
from localq.cli.verbs import quantize_bcq, quantize_calibrated, quantize_record
from localq.cli.verbs.quantize_calibrated import WEIGHED_WINDOWS, CalibrationOptions
from localq.errors import usage_error
from localq.files import format_facts
from localq.planner import budget
from localq.settings import Settings
from localq.wording import OnProgress, human_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from localq.files.hub.shards import Shards
    from localq.files.model_folder import ModelFiles
    from localq.files.publish.record import ConversionRecord
    from localq.quantize.calibration import Texts
    from localq.quantize.model.input_moments import CalibrationText
    from localq.quantize.prequantized_layers import PrequantizedLayers


_FORMATS = "Target format: nf4, mxfp4, bcq, squeezellm, vq2 or aqlm2x8."
_KEEP = "Keep the downloaded SOURCE (vq2, aqlm2x8)."


def quantize(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Name, ORG/REPO, folder or .gguf file.", autocompletion=options.complete_names
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FOLDER", help="Output folder.", rich_help_panel=help_page.MODEL),
    ],
    format: Annotated[
        str, typer.Option("--format", "-f", metavar="FORMAT", help=_FORMATS, rich_help_panel=help_page.MODEL)
    ] = "nf4",
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
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the model in --out.", rich_help_panel=help_page.MODEL)
    ] = False,
    keep: Annotated[bool, typer.Option("--keep-source", help=_KEEP, rich_help_panel=help_page.ADVANCED)] = False,
    offline: options.Offline = None,
    token: options.Token = None,
    yes: agree.Yes = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Quantize SOURCE into a model folder.

    nf4 and mxfp4 need no calibration text; the other formats use it. vq2 and aqlm2x8 take minutes to hours; rerun the
    same command to resume.
    """
    mix = quantize_bcq.mixture(format, bits, group, zero_points)
    scheme = quantize_bcq.scheme(format, bits, group, zero_points) if mix is None else ""
    texts = tuple(calibration or ()) or None
    wish = quantize_calibrated.wants_best(best, quick)
    calibration_options = CalibrationOptions(
        None if scheme or mix else bits, texts, windows, wish, device, seed, vram, layers
    )
    settings = options.load_settings(offline=offline, device=device, vram=vram)
    processes.check_torch()
    given = quantize_record.words(
        bits=bits, group=group, zero_points=zero_points, calibration=texts, windows=windows, best=best, seed=seed,
        layers=layers,
    )  # fmt: skip
    job = _Conversion(source, format, out, force, quiet, settings, keep, scheme, mix, yes, given)
    folder = job.run(calibration_options)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if json:
        print_json({"path": str(folder), "format": format, "weights_bytes": weights})
    else:
        job.say(f"{folder}: {human_bytes(weights)} of weights. To chat, run `localq chat {folder}`.")


@dataclass(frozen=True)
class _Conversion:
    """Source, format and folder of one conversion, and how to make it."""

    source: str
    format: str
    out: Path
    force: bool
    quiet: bool
    settings: Settings
    keep_source: bool
    scheme: str = ""
    mix: float | None = None  # bits per weight of a mixture of bcq
    yes: bool = False
    options: tuple[str, ...] = ()  # as given, for the record

    def record(
        self, files: ModelFiles, asked: CalibrationOptions, windows: Sequence[Sequence[int]] = ()
    ) -> ConversionRecord:
        """The record of this conversion; windows: of the calibration text, if any."""
        return quantize_record.record(self.source, files.path, self.format, self.options, asked, windows)

    def say(self, line: str) -> None:
        """Print a line unless quiet."""
        if not self.quiet:
            note(line)

    def run(self, asked: CalibrationOptions) -> Path:
        """Make the folder and return it. Options are checked before anything is fetched."""
        from localq.files import format_facts  # start-up cost: not for --help
        from localq.files.model_folder import open_model
        from localq.planner import prepare
        from localq.quantize import calibration

        formats = format_facts.writable()
        if self.format not in formats:
            raise usage_error(self.format, "localq cannot write this format", f"Formats: {', '.join(formats)}.")
        made = formats[self.format]
        asked.check(self.format, self.mix is not None)
        ready = None
        if asked.layers is None:
            prepare.check_can_make(self.format, self.source)
        else:
            from localq.quantize import prequantized_layers

            ready = prequantized_layers.open_layers(asked.layers)
        if not self.yes and not self.out.exists():  # an interrupted conversion resumes
            agree.check_quantize(self.source, self.format, self.out, self.settings, keep_source=self.keep_source)
        on_text = made.made_from == "text"
        weighed = made.weighs_text and not asked.without_text
        text = calibration.read_texts(asked.texts) if on_text or weighed else ()
        if on_text and not self.keep_source and (shards := self._remote()):
            return self._from_hub(shards, text, asked, ready)
        with _progress(self.quiet) as on_progress:
            files = open_model(prepare.source_path(self.source, self.say, on_progress, self.settings.offline))
            if not on_text:
                weighing = self._weighing(files, text, asked) if weighed else None
                record = self.record(files, asked, weighing.windows if weighing is not None else ())
                return self._convert_by_tensor(files, weighing, on_progress, record)
        if ready is not None and not asked.best:
            return self._around(files, ready, asked)
        return self._on_text(files, text, asked, ready)

    def _convert_by_tensor(
        self,
        files: ModelFiles,
        weighing: CalibrationText | None,
        on_progress: OnProgress | None,
        record: ConversionRecord,
    ) -> Path:
        """Convert each matrix alone, in one pass over the weights."""
        from localq.quantize import by_tensor  # torch loads only now
        from localq.quantize.bits import binary_mixture
        from localq.quantize.request import TensorwiseRequest

        budget = None if weighing is None or self.mix is None else binary_mixture.BitBudget(self.mix, weighing)
        text = weighing if budget is None else None
        request = TensorwiseRequest(files, self.format, self.out, self.scheme, text, budget, self.force, record=record)
        return by_tensor.convert(request, on_progress, self.say)

    def _weighing(self, files: ModelFiles, text: Texts, asked: CalibrationOptions) -> CalibrationText | None:
        """The text that weights errors, and its device; None for a mixture of experts unless requested."""
        from localq.engine.load.device import device_name, pick
        from localq.files.architecture import Architecture
        from localq.quantize import calibration
        from localq.quantize.model.input_moments import CalibrationText

        if asked.is_bare and self.mix is None and Architecture.from_config(files.config).experts:
            self.say(
                f"{files.name}: {format_facts.NO_WEIGHING_OF_EXPERTS}; quantizing each matrix without calibration."
            )
            return None
        choice = pick(self.settings.device)
        ids = calibration.token_windows(files, text, asked.windows, WEIGHED_WINDOWS)
        for line in choice.notes:
            self.say(line)
        counted = f"{len(ids)} window{'s' * (len(ids) > 1)} of {len(ids[0])} tokens"
        where = device_name(choice.device)
        what = "computing error weights" if self.mix is None else "computing error weights and choosing bit widths"
        self.say(f"{files.name}: {what} using {counted}, on {where}. To skip this step, use --calibration none.")
        return CalibrationText(ids, choice.device)

    def _around(
        self, files: ModelFiles, ready: PrequantizedLayers, asked: CalibrationOptions, shards: Shards | None = None
    ) -> Path:
        """Quantize embedding and head around existing layers."""
        import torch

        from localq.cli import progress as progress_lines
        from localq.quantize import by_layer, prequantized_layers
        from localq.quantize.request import LayerwiseRequest

        prequantized_layers.check(ready, files, shards)
        cpu = torch.device("cpu")  # seconds of work, and the same bytes everywhere
        request = LayerwiseRequest(
            files, self.out, (), cpu, seed=ready.seed, force=self.force, shards=shards, layers=ready,
            record=self.record(files, asked),
        )  # fmt: skip
        with progress_lines.quantize_bar(self.quiet) as on_progress:
            return by_layer.convert(request, on_progress, self.say)

    def _remote(self) -> Shards | None:
        """The weights file by file, if the hub has them and this machine does not."""
        from localq.files.hub import shards as hub_shards
        from localq.planner import prepare

        source = prepare.remote_source(self.source, self.settings.offline)
        if not self.out.absolute().name:
            raise usage_error("--out", f"{self.out} is the root folder", "Choose a folder inside it.")
        cache = self.out.absolute().with_name(f"{self.out.absolute().name}.source")
        return None if source is None else hub_shards.open_shards(source, cache)

    def _from_hub(
        self, shards: Shards, text: Texts, asked: CalibrationOptions, ready: PrequantizedLayers | None
    ) -> Path:
        from localq.files.model_folder import open_model
        from localq.quantize.output.shards import load_state

        self.say(f"{self.source}: downloaded during quantization, then deleted (use --keep-source to keep it).")
        try:
            files = open_model(shards.folder, weights=False)
            if ready is not None and not asked.best:
                return self._around(files, ready, asked, shards)
            return self._on_text(files, text, asked, ready, shards)
        finally:
            shards.close(done=load_state(self.out) is None)  # finished, or not started

    def _on_text(
        self,
        files: ModelFiles,
        text: Texts,
        asked: CalibrationOptions,
        ready: PrequantizedLayers | None,
        shards: Shards | None = None,
    ) -> Path:
        """Quantize the layers on a text, or train the `ready` ones on it."""
        from localq.cli import progress as progress_lines
        from localq.engine.load.device import device_name, pick
        from localq.quantize import by_layer, calibration, prequantized_layers
        from localq.quantize.request import LayerwiseRequest

        if ready is not None:
            prequantized_layers.check(ready, files, shards)
        choice, best = pick(self.settings.device), bool(asked.best)
        hard, tuning = quantize_calibrated.effort(best=best and ready is None)
        ids = calibration.token_windows(files, text, asked.windows, None if best else quantize_calibrated.QUICK_WINDOWS)
        paths = f", beam of {hard.beam} paths per row" if ready is None else ""
        counted = f"{len(ids)} window{'s' * (len(ids) > 1)} of {len(ids[0])} tokens{paths}"
        where = device_name(choice.device)
        request = LayerwiseRequest(
            files,
            self.out,
            ids,
            choice.device,
            format=self.format,
            scheme=asked.scheme,
            bits=asked.mixture_bits,
            effort=hard,
            tuning=tuning,
            joint_tuning=quantize_calibrated.joint_training(len(ids), best=best),
            seed=(asked.seed or 0) if ready is None else ready.seed,
            vram_bytes=budget.vram_limit(self.settings),
            force=self.force,
            shards=shards,
            layers=ready,
            record=self.record(files, asked, ids),
            start_note=f"{files.name}: {counted}, on {where}. If interrupted, run the same command to resume.",
        )
        is_idle = request.vram_bytes and choice.device.type == "cpu"
        idle = ("--vram is ignored when running on the CPU",) if is_idle else ()
        for line in (*choice.notes, *idle):
            self.say(line)
        with progress_lines.quantize_bar(self.quiet) as on_progress:
            return by_layer.convert(request, on_progress, self.say)


@contextmanager
def _progress(quiet: bool) -> Iterator[OnProgress | None]:
    """A progress bar on stderr, if it is a terminal."""
    if quiet or not is_rich_terminal(stderr()):
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
