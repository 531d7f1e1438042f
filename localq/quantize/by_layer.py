"""Quantize a model layer by layer on calibration text (`target.py`); an interrupted conversion resumes.

Every layer is a shard of its own. A resumed conversion runs the text through the finished layers, with the weights
that were written for them, so the result is the same. Memory: `memory.py` counts that of the device; the host holds the
text twice, as wide as the model's residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localq import kernels
from localq.engine.load import vram
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files.extra_tensors import MORE_TOKENS, is_of_mtp_block
from localq.formats.checkpoint import Checkpoint, TensorInfo, info
from localq.models import architecture
from localq.models.decoder import Block
from localq.planner import prepare
from localq.quantize import fetch_order, memory, prequantized_layers
from localq.quantize.bits import mixture as bit_mixture
from localq.quantize.codebooks import joint_output, joint_training
from localq.quantize.codebooks.initial_codebooks import load_initial
from localq.quantize.codebooks.layer import pass_full, pass_layer, quantize_layer
from localq.quantize.model.calibration_stream import Streams, stream_dtype
from localq.quantize.model.matrix_groups import groups_of
from localq.quantize.model.sensitivity import sensitivities, spread_indices
from localq.quantize.model.source import SourceModel
from localq.quantize.output.folder import claim_folder, output_dtype, write_small_files
from localq.quantize.output.resume_files import ResumeFiles
from localq.quantize.output.sensitivity_log import SensitivityLog
from localq.quantize.output.shards import Shard, ShardWriter, plan_shards, start_state
from localq.quantize.request import LayerwiseRequest, config_changes, layerwise_task, open_source, source_note
from localq.quantize.settings import ConversionSettings, QuantizedLayer, Tuning, rotate_mode
from localq.quantize.target import target_format
from localq.wording import DOWNLOADING, OnProgress, Say

# Stages: layers quantized, finished layers run through, and before both the sensitivities of a mixture.
QUANTIZING, CATCHING_UP, MEASURING = "quantizing", "resuming", "measuring sensitivity"
TRAINING = "training all layers"
LESS = "use a smaller --windows, or use --device cpu"  # where memory runs out
QUANTIZING_FIRST = f"{QUANTIZING} (then {TRAINING})"  # the time left is not the whole


def convert(request: LayerwiseRequest, on_progress: OnProgress | None = None, say: Say | None = None) -> Path:
    """Quantize into `request.out` and return it. The same call resumes an interrupted conversion.

    Raises LocalqError: exit 2 for an unusable source or text, or an `out` that holds something else, 7 without the
    compiled part, 3 for memory, 8 for damaged weights, 9 for the disk.
    """
    on_gpu = request.device.type == "cuda"
    if request.layers is None and (why := kernels.why_not() if on_gpu else kernels.host_why_not()):
        raise prepare.cannot_search(request.format, why)
    source, out = request.source, request.out
    family = architecture(source.config, source.name)
    if not request.windows and request.layers is None:
        raise usage_error("--calibration", "the text is shorter than one window", "Use a longer text.")
    with open_source(request) as checkpoint, torch.no_grad():
        source = replace(source, config=checkpoint.config)  # its head, where the files decide on it
        request = replace(request, source=source)
        with memory.guard(out, LESS):
            model = SourceModel(source, checkpoint, family, request.device, request.seed)
        if request.bits is not None and model.model.config.experts:
            why = "all matrices of a mixture-of-experts model must use the same bit width"
            raise usage_error("--bits", why, "Use 2, 2.5, 3 or 4.")
        on_source = source_note(source, checkpoint, model.origin)
        not_joint = joint_output.why_not(request.joint_tuning, model, source.name, ready=request.layers is not None)
        with memory.guard(out, LESS):
            work = _LayerwiseConversion(request, model, checkpoint)
            work.place()
        task = layerwise_task(request, work.layouts)
        report, note = on_progress or (lambda what, done, total: None), say or (lambda line: None)
        with claim_folder(source, out, task, request.force):
            for line in filter(None, (on_source, not_joint, request.start_note, _without_mtp(checkpoint))):
                note(line)
            with memory.guard(out, LESS):
                if request.bits is not None:
                    start_state(out, task)
                    work.mix(task, report, note)
                shards = plan_shards(work.layouts, 1)
                writer = ShardWriter(out, shards, task, work.drafts(shards))
                writer.check_space()
                start_state(out, task)
                if request.layers is not None:
                    prequantized_layers.copy_layers(
                        request.layers, writer, work.drafts(shards) or shards[1 : 1 + model.layers]
                    )
                work.run(writer, shards, ResumeFiles(out, task), report, note)
            write_small_files(source, work.quantization_config(), out, work.changes(), request.record)
            (out / joint_training.FILE).unlink(missing_ok=True)
            writer.finish()
            (out / bit_mixture.FILE).unlink(missing_ok=True)
    return out


def _without_mtp(checkpoint: Checkpoint) -> str:
    """The notice for files with an MTP block, which has no calibration."""
    if not any(map(is_of_mtp_block, checkpoint.extra.get(MORE_TOKENS, ()))):
        return ""
    return "The MTP block is dropped, so the new model drafts only from the conversation. To keep it, use nf4."


class _LayerwiseConversion:
    """One layer-by-layer conversion: its settings, the layout of its shards, and its steps."""

    def __init__(self, request: LayerwiseRequest, model: SourceModel, checkpoint: Checkpoint) -> None:
        self._request, self._model = request, model
        self._target = target_format(request.format, request.scheme)
        self._stated = self._target.dtype(output_dtype(request.source))
        self._dtype = getattr(torch, self._stated)
        rotate = rotate_mode(model.rotated, self._target.rotates)
        is_joint = joint_output.is_trained_jointly(request.joint_tuning, model)
        joint_tuning = request.joint_tuning if is_joint else Tuning()
        self._settings = ConversionSettings(
            request.effort,
            (),
            request.correction,
            rotate,
            request.seed,
            self._target.shares,
            request.tuning,
            self._dtype,
            joint_tuning=joint_tuning,
        )
        self._groups = [groups_of(model.meta_block(index)) for index in range(model.layers)]
        self._rest = model.unread()
        self._checkpoint = checkpoint
        shapes, (first, last) = model.end_shapes(), model.end_names()
        self._first = {name: info(self._dtype, shapes[name]) for name in first}
        self._first |= {name: checkpoint.tensors[name] for name in self._rest}
        self._last = {name: info(self._dtype, shapes[name]) for name in last}
        self._schemes = [[self._target.scheme] * len(groups) for groups in self._groups]
        self._codebooks = {self._target.scheme: load_initial(self._target.scheme, request.device)}
        bit_mixture.check_budget(model, self._settings.shares, self._layout, request.bits)

    @property
    def layouts(self) -> list[dict[str, TensorInfo]]:
        """The tensors of every shard: embedding, layers, and the head where it is not the embedding."""
        layers = [self._layout(index, schemes) for index, schemes in enumerate(self._schemes)]
        return [self._first, *layers, *([self._last] if self._last else [])]

    def _layout(self, index: int, schemes: list[str]) -> dict[str, TensorInfo]:
        """Return the tensors of a layer whose groups have these schemes."""
        groups, rotate, shares = self._groups[index], self._settings.rotate, self._target.shares
        signed = {name for group in groups if group.is_rotated(rotate) for name in group.names}
        homes = {name: home for group in groups for name, home in group.homes(shares).items()}
        each = [target_format(self._target.name, scheme) for scheme in schemes]
        targets = {name: target for group, target in zip(groups, each, strict=True) for name in group.names}
        return self._model.layout(index, targets, signed, homes, self._dtype)

    def place(self) -> None:
        """Decide what waits on the host, and limit the allocator of a GPU.

        Raises LocalqError (exit 3) where a layer does not fit: on a GPU, or in RAM with the windows of the text.
        """
        request, model = self._request, self._model
        table = max(each.nbytes for each in (*self._first.values(), *self._last.values()))  # as it is read
        if not (request.layers is None or self._settings.joint_tuning.steps):
            memory.check_ram(request.source.name, table + model.rotation_bytes, "")
            return
        hidden, tokens = model.model.config.hidden, len(request.windows[0])
        count = partial(memory.count, device=request.device.type, rotated=model.rotated)
        count = partial(count, vocab=model.model.config.vocab_size, made=request.layers is not None)

        def counted(settings: ConversionSettings) -> memory.MemoryCount:
            each = (count(block, hidden, tokens, settings) for block in model.kinds())
            return max(each, key=lambda count: count.peak)

        streams = 2 * 2 * len(request.windows) * tokens * hidden  # of the source and the result, in 16 bit
        if request.device.type != "cuda":
            peak = max(counted(self._settings).peak, table + model.rotation_bytes)
            memory.check_ram(request.source.name, peak + streams)
            return
        memory.check_ram(request.source.name, table + streams)
        held = vram.open_budget(request.device, request.vram_bytes, {})
        self._settings = memory.place(request.source.name, counted, self._settings, held.budget)
        held.hold(held.context)

    def mix(self, task: dict[str, Any], on_progress: OnProgress, say: Say) -> None:
        """Choose the schemes for the requested bits, or load the choice of an interrupted run; see `mixture`."""
        request = self._request
        self._schemes = bit_mixture.load_or_choose(
            request.out, task, self._model.layers, lambda log: self._choose(log, on_progress, say)
        )
        every = {scheme for schemes in self._schemes for scheme in schemes}
        self._codebooks = {scheme: load_initial(scheme, request.device) for scheme in every}

    def _choose(self, log: SensitivityLog, on_progress: OnProgress, say: Say) -> bit_mixture.Schemes:
        """Return the choice; the measuring resumes from `log`."""
        request, model, total = self._request, self._model, 2 * self._model.layers
        done = 0

        def before(left: Sequence[int]) -> None:
            nonlocal done
            release(left)
            done = total - sum(0 < number <= model.layers for number in left)
            on_progress(MEASURING, done, total)

        source = (request.shards, model, self._rest)
        release = fetch_order.release_while_measuring(
            *source, lambda what: on_progress(f"{DOWNLOADING} {what}", done, total)
        )
        rows = partial(self._embedded, spread_indices(len(request.windows)))
        prices = sensitivities(model, rows, request.device, self._settings, log, before)
        return bit_mixture.choose_schemes(model, prices, self._settings.shares, self._layout, request.bits or 0.0, say)

    def quantization_config(self) -> dict[str, Any]:
        """Return the `quantization_config` of config.json."""
        modules = [name.removesuffix(".weight") for group in self.layouts for name in group if name.endswith(".weight")]
        return self._target.quantization_config(self._stated, modules)

    def changes(self) -> dict[str, Any]:
        """Return changes of config.json: a rotated head is no longer the embedding."""
        untied = {"tie_word_embeddings": False} if self._model.rotated else {}
        return {"dtype": self._stated, **config_changes(self._request.source.config, untied)}

    def drafts(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return draft shards of the layers where these are trained together before they are written, else none."""
        layers = shards[1 : 1 + self._model.layers]
        return joint_output.draft_shards(layers) if self._settings.joint_tuning.steps else []

    def run(
        self, writer: ShardWriter, shards: list[Shard], resume: ResumeFiles, on_progress: OnProgress, say: Say
    ) -> None:
        """Write the pending shards."""
        pending = {shard.name for shard in writer.pending()}
        layers, total, done = self._model.layers, self._model.weights(), 0
        final = shards[1 : 1 + layers]
        drafts = self.drafts(shards) if any(shard.name in pending for shard in final) else []
        files = [shards[0], *(drafts or final), *shards[1 + layers :]]

        def advance(weights: int, what: str = QUANTIZING_FIRST if drafts else QUANTIZING) -> None:
            nonlocal done
            done += weights
            on_progress(what, done, total)

        advance(0)
        wanted = [index for index, shard in enumerate(files) if shard.name in pending]
        last = layers if drafts else max((index for index in wanted if index <= layers), default=0)
        units = sorted({*range(last + 1 if last else 0), *wanted})  # the text runs through every layer before the last
        source = (self._request.shards, self._model, self._rest)
        release = fetch_order.release_while_quantizing(
            *source, units, lambda what: on_progress(f"{DOWNLOADING} {what}", done, total)
        )
        written = joint_output.LayerFiles(self._model, self._target, writer.folder, files, self._request.source.config)
        for at, unit in enumerate(units):
            release(units[at:])
            if not 0 < unit <= layers and unit in wanted:
                writer.write(files[unit], self._end_tensors(files[unit]))
            if unit == 0 and last:
                streams = self._streams()
            if 0 < unit <= layers and unit in wanted:
                self._quantize(unit - 1, streams, writer, files[unit], advance)
            elif 0 < unit <= layers:
                self._run_finished(unit - 1, streams, written, read_on=any(unit < later <= layers for later in wanted))
                advance(total // layers, CATCHING_UP)
        advance(total - done)  # finished layers at the end
        if drafts:
            self._train(written, streams, writer, final, resume, on_progress, say)

    def _end_tensors(self, shard: Shard) -> Iterator[tuple[str, Tensor | Iterator[Tensor]]]:
        """Embedding or head, some rows at a time, and the tensors outside the decoder."""
        for name, rows in self._model.end_rows(shard.tensors).items():
            yield name, (self._cast(name, part, self._stated) for part in rows)
        for name in self._rest:
            if name in shard.tensors:
                yield name, self._checkpoint.read(name)

    def _quantize(
        self, index: int, streams: Streams, writer: ShardWriter, shard: Shard, on_group: Callable[[int], None]
    ) -> None:
        block, codebooks = self._model.block(index), tuple(self._codebooks[scheme] for scheme in self._schemes[index])
        made = quantize_layer(block, index, streams, replace(self._settings, codebooks=codebooks), on_group)
        streams.check(index, self._request.source.name, self._dtype)
        self._write(index, made, block, writer, shard)

    def _write(self, index: int, made: QuantizedLayer, block: Block, writer: ShardWriter, shard: Shard) -> None:
        tensors = self._model.tensors(made, block, index, self._target).items()
        writer.write(shard, ((name, self._cast(name, each, shard.tensors[name].dtype)) for name, each in tensors))

    def _run_finished(self, index: int, streams: Streams, written: joint_output.LayerFiles, *, read_on: bool) -> None:
        """Run the text through a finished layer; read_on: a later layer is quantized on the result."""
        if not read_on:
            pass_full(self._model.block(index), streams, self._settings)
            return
        packed, others = written.layer(index, trained=self._request.tuning.steps > 0)
        pass_layer(self._model.block(index), packed, others, streams, self._settings)
        streams.check(index, self._request.source.name, self._dtype)

    def _train(
        self,
        written: joint_output.LayerFiles,
        streams: Streams,
        writer: ShardWriter,
        shards: Sequence[Shard],
        resume: ResumeFiles,
        on_progress: OnProgress,
        say: Say,
    ) -> None:
        """Train the quantized layers together, and write the result."""
        streams.x.clear()  # inputs of layers, which are all quantized now
        request, on_step = self._request, partial(on_progress, TRAINING)
        trained = joint_output.train(
            written, streams, request.windows, self._settings, resume, on_step, request.source.name
        )
        say(f"{request.source.name}: {trained.summary}")
        pending = {shard.name for shard in writer.pending()}
        for index, ((made, block), shard) in enumerate(zip(trained.layers, shards, strict=True)):
            if shard.name in pending:
                self._write(index, made, block, writer, shard)

    def _cast(self, name: str, tensor: Tensor, dtype: str) -> Tensor:
        """Return the tensor in its output dtype."""
        cast = tensor.to(getattr(torch, dtype))
        if cast.is_floating_point() and not bool(torch.isfinite(cast).all()):
            why = f"some values are outside the range of {dtype}, the dtype that {self._request.format} uses"
            raise LocalqError(name, why, "If the source is intact, use a different --format.", ExitCode.BAD_FILE)
        return cast

    def _streams(self) -> Streams:
        """Return the text as the input of the first layer."""
        windows, model = self._request.windows, self._model.model
        model.make_tables(len(windows[0]), self._request.device)
        return Streams(model, self._embedded(range(len(windows))), self._request.device)

    def _embedded(self, numbers: Sequence[int]) -> list[Tensor]:
        """Return the input of the first layer [T, hidden] for the windows with these numbers."""
        windows, model = [self._request.windows[number] for number in numbers], self._model.model
        dtype = stream_dtype(len(windows), len(windows[0]), model.config.hidden)
        return [model.scale_embedding(each).to(dtype) for each in self._model.embeddings(windows)]
